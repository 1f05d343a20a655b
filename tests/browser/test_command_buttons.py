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
  const { ButtonGroup } = await import("http://live.test/header.js");
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


PAINT = """async () => {
  const { Painter } = await import("http://live.test/painter.js");
  const button = document.createElement("button");
  button.textContent = "press";
  document.body.append(button);
  window.draws = 0;
  const card = window.card = { dirty: false, visible: true, width: 1, plotted: true, drawnAt: 0 };
  card.draw = () => ((card.dirty = false), (draws += 1));
  const store = { answer: {}, events: [], axis: "step", range: [0, 1] };
  window.painter = new Painter(store, () => [card], () => {});
  painter.usePlotly({});
  window.stale = () => ((card.dirty = true), painter.schedule());
}"""


def test_no_redraw_begins_between_the_arrival_on_a_button_and_the_click(browser: Browser) -> None:
    page = browser.new_page()
    page.clock.install(time=0)
    page.route("http://live.test/**", serve)
    page.goto("http://live.test/")
    page.clock.pause_at(1_000)

    def draws_after(ms: int) -> int:
        page.clock.run_for(ms)
        return int(page.evaluate("draws"))

    page.evaluate(PAINT)
    page.evaluate("stale()")
    assert draws_after(50) == 1
    draws_after(1_000)
    page.evaluate(
        "document.querySelector('button').addEventListener('click', () => painter.redrawAll())"
    )
    page.get_by_role("button", name="press").hover()
    page.evaluate("stale()")
    assert draws_after(900) == 1
    page.get_by_role("button", name="press").click()  # what the user causes is drawn at once
    assert draws_after(50) == 2
    page.evaluate("stale()")
    assert draws_after(1_100) == 3, "though the pointer is still on the button"
    page.mouse.move(0, 0)
    page.evaluate("card.plotted = false")
    page.get_by_role("button", name="press").hover()
    page.evaluate("stale()")
    assert draws_after(50) == 4, "a first drawing does not wait"
    page.close()
