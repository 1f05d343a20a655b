"""The command buttons in a browser, without a server."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Route

import dashboard.live_chart

FOLDER = Path(dashboard.live_chart.__file__).parent


def serve(route: Route) -> None:
    name = route.request.url.rsplit("/", 1)[1]
    if name:
        route.fulfill(path=FOLDER / name, content_type="text/javascript")
    else:
        route.fulfill(body="<body></body>", content_type="text/html")


DRAW = """async (names) => {
  const { ButtonGroup } = await import("http://live.test/commands.js");
  if (!window.group) {
    window.sent = [];
    window.group = new ButtonGroup(false, (spec, args) => sent.push([spec.name, args]), "");
    document.body.append(group.node);
  }
  const when = { running: null };
  group.configure(names.map((name) => ({ name, label: name, help: "", memory: false, when })));
  group.update("running", null);
}"""


def test_an_open_popover_stays_while_buttons_come_and_go(browser: Browser) -> None:
    page = browser.new_page()
    page.route("http://live.test/**", serve)
    page.goto("http://live.test/")
    page.evaluate(DRAW, ["pause", "mark", "stop"])
    page.get_by_role("button", name="mark", exact=True).click()
    page.keyboard.type("lower")
    page.evaluate(DRAW, ["resume", "mark", "profile"])
    labels = page.locator(".ss-buttons .ss-button[type=button]")
    assert labels.all_inner_texts() == ["resume", "mark", "profile"]
    page.keyboard.type(" rate")
    page.keyboard.press("Enter")
    assert page.evaluate("sent") == [["mark", {"text": "lower rate"}]]
    page.close()
