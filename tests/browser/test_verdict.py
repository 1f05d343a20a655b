"""The line above the tiles: what the steps wait for, and the link that sets the sidebar."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.support.recorded_runs import rows, write_run
from tests.support.server import Server
from trainer.config import RunConfig


def test_the_link_sets_the_sidebar(server: Server, open_page: Callable[..., Page]) -> None:
    server.runs.mkdir(exist_ok=True)
    told = {"config": RunConfig().to_dict(), "environment": {"cores": 8}}
    write_run(server.runs / "own", told, steps=rows(0.063))
    page = open_page("/?run=own")
    line = page.get_by_test_id("verdict")
    expect(line).to_be_visible()
    expect(line).to_contain_text("63%")
    above = line.bounding_box()
    tiles = page.get_by_test_id("kpi-loss").bounding_box()
    assert above is not None
    assert tiles is not None
    assert above["y"] + above["height"] <= tiles["y"]
    apply = line.get_by_role("button", name="num_workers 4")
    apply.press("Enter")
    page.wait_for_url("**num_workers=4**")
    page.get_by_test_id("stSidebar").get_by_text("Data loading").click()
    number = page.get_by_label("num_workers", exact=True)
    expect(number).to_have_value("4")
    expect(apply).to_have_count(0)
    # Where the reader sets it back, it is proposed again.
    number.fill("0")
    number.press("Enter")
    expect(apply).to_be_visible()
