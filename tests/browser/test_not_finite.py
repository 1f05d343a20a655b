"""Losses that are NaN or infinite: a marked gap in the line, and the first step in the tile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from stepscope.run import RunKind, RunStatus
from stepscope.store.recorder import Recorder
from tests.support.browser_page import OpenPage
from tests.support.server import Server

NAN, INF = math.nan, math.inf


def record(folder: Path, losses: list[float]) -> None:
    """Write a finished watched run with these losses."""
    folder.mkdir(parents=True)
    recorder = Recorder(folder, name="train", kind=RunKind.WATCH)
    recorder.describe(device="cpu", optimizers=["Adam"])
    recorder.set_status(RunStatus.RUNNING)
    for step, loss in enumerate(losses, 1):
        recorder.log(step, {"train/loss": loss, "perf/step_time": 0.01})
    recorder.close(RunStatus.FINISHED)


def plot(page: Page, expression: str) -> Any:
    """Return a value of the loss chart's Plotly node."""
    node = page.get_by_test_id("chart-loss").locator(".js-plotly-plot")
    return node.evaluate(f"node => {expression}")


BANDS = "node.layout.shapes.filter((one) => one.type === 'rect').length"


def shown(open_page: OpenPage, run: str) -> Page:
    page = open_page(f"/?run={run}")
    live = page.get_by_test_id("stepscope-live")
    expect(live).to_have_attribute("data-ready", "1")
    return page


@pytest.mark.parametrize("rows", [100, 2000])  # rows as they are, and several in a bucket
def test_a_gap_is_marked_and_the_tile_has_the_word(
    open_page: OpenPage, server: Server, rows: int
) -> None:
    gap, end = rows // 2, rows - rows // 5
    losses = [1 + 1 / step for step in range(1, rows + 1)]
    losses[gap : gap + rows // 10] = [INF] * (rows // 10)
    losses[end:] = [NAN] * (rows - end)
    record(server.runs / f"odd-{rows}", losses)
    page = shown(open_page, f"odd-{rows}")
    expect(page.get_by_test_id("kpi-loss")).to_contain_text("NaN")
    expect(page.get_by_test_id("chart-loss").locator(".legend")).to_contain_text("train NaN")
    assert plot(page, BANDS) == 2
    # Two parts; a bucket with values and a gap is a part too.
    assert plot(page, "[...node.data.at(-1).y]").count(None) in (1, 2)
