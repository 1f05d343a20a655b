"""The buttons of the live page in a browser, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Route

import dashboard.live_chart

FOLDER = Path(dashboard.live_chart.__file__).parent


def serve(route: Route) -> None:
    name = route.request.url.rsplit("/", 1)[1]
    if name:
        route.fulfill(path=FOLDER / name, content_type="text/javascript")
    else:
        route.fulfill(body="<body></body>", content_type="text/html")


def spec(name: str) -> dict[str, Any]:
    return {"name": name, "label": name, "help": "", "memory": False, "when": {"running": None}}


def test_an_open_box_stays_while_buttons_come_and_go(browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("http://live.test/**", serve)
    page.goto("http://live.test/")

    def draw(*names: str) -> None:
        page.evaluate(
            """async (specs) => {
              const { ButtonGroup } = await import("http://live.test/commands.js");
              if (!window.group) {
                window.sent = [];
                const send = (spec, args) => sent.push([spec.name, args]);
                window.group = new ButtonGroup(false, send, "");
                document.body.append(group.node);
              }
              group.configure(specs);
              group.update("running", null);
            }""",
            [spec(name) for name in names],
        )

    draw("pause", "mark", "stop")
    page.get_by_role("button", name="mark", exact=True).click()
    page.keyboard.type("lower")
    draw("resume", "mark", "profile")
    labels = page.locator(".ss-buttons .ss-button[type=button]")
    assert labels.all_inner_texts() == ["resume", "mark", "profile"]
    page.keyboard.type(" rate")
    page.keyboard.press("Enter")
    assert page.evaluate("sent") == [["mark", {"text": "lower rate"}]]
    context.close()
