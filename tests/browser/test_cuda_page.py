"""The page with CUDA in a browser: on the simulator (simulator/) or on a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from stepscope.common.formatting import format_bytes
from stepscope.store import EventRow, StoreReader
from tests.conftest import Need
from tests.support.browser_page import (
    TRAINS_MS,
    OpenPage,
    button,
    choose,
    points,
    start,
    wait_until,
    window,
)
from tests.support.memory_page import areas, open_memory, table
from tests.support.server import Server, start_server, stop_server
from trainer.training.devices import cuda_reason

TOO_LARGE = "width=256&image_size=256&batch_size=512"  # 34 GB for the first layer's output
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16 AMP", "fp16": "fp16 AMP"}
MEMORY = {"allocated", "reserved", "peak allocated", "device used", "total"}
HELD = 256 * 2**20
HOLD = f"""
import torch
held = torch.empty({HELD}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
input()
"""
"""A program that holds memory of the first GPU until it is told to end."""


def small_gpus(folder: Path) -> dict[str, str]:
    """The simulator's variables for two small GPUs; a GPU that is there takes no notice."""
    return {"CUDASIM_DEVICES": "2", "CUDASIM_MEMORY": "1G", "CUDASIM_SHM": str(folder / "gpus")}


@pytest.fixture
def server(need: Need, browser: Browser, tmp_path: Path) -> Iterator[Server]:
    """A server that sees the GPUs; of the simulator two small ones that no other test shares."""
    need(cuda_reason())
    server = start_server(tmp_path, **small_gpus(tmp_path))
    yield server
    stop_server(server)


def newest(server: Server) -> Path:
    """The run that began last; names tell whole seconds only."""
    files = server.runs.glob("*/run.json")
    return max(files, key=lambda file: float(json.loads(file.read_text())["created"])).parent


def run_json(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((newest(server) / "run.json").read_text())
    return found


def event(server: Server, kind: str) -> EventRow:
    with StoreReader(newest(server)) as reader:
        (found,) = [event for event in reader.events() if event.kind == kind]
    return found


def events(page: Page, kind: str) -> Locator:
    """Return the page's rows of the events of a kind."""
    return page.get_by_test_id("events").locator(f"tr[data-kind={kind}]")


def memory_lines(page: Page) -> dict[str, int]:
    """Return the number of points of each line of the memory chart."""
    plot = page.get_by_test_id("chart-memory").locator(".js-plotly-plot")
    lines = "node.data.map((line) => [line.name, line.x.length])"
    found: dict[str, int] = plot.evaluate(f"node => Object.fromEntries({lines})")
    return found


def memory_line(page: Page, name: str) -> list[float]:
    """Return the values of a line of the memory chart, in MiB."""
    plot = page.get_by_test_id("chart-memory").locator(".js-plotly-plot")
    line = f"node.data.find((line) => line.name.startsWith('{name}'))"
    found: list[float | None] = plot.evaluate(f"node => Array.from({line}.y)")
    return [value for value in found if value is not None]


def tile(page: Page, name: str) -> str:
    return page.get_by_test_id(f"kpi-{name}").locator(".ss-num").inner_text()


def test_a_device_and_each_precision_are_chosen_and_train(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page("/?workload=linear&epochs=2")
    box = page.get_by_test_id("stSidebar").get_by_role("combobox", name="Device")
    expect(box).to_have_value(re.compile("cuda:"), timeout=TRAINS_MS)  # the best is chosen
    choose(page, "Device", "CPU")
    expect(page).to_have_url(re.compile("device=cpu"))
    box.click()
    name = page.get_by_role("option", name="cuda:").all_inner_texts()[-1].strip()
    page.get_by_role("option", name=name, exact=True).click()
    expect(box).to_have_value(name)
    assert box.evaluate("node => node.scrollWidth <= node.clientWidth")  # the name is whole
    uuid = page.get_by_test_id("stSidebar").locator("code").first.inner_text()
    used = []
    for precision, label in PRECISIONS.items():
        picker = page.get_by_test_id("stSidebar").get_by_role("combobox", name="Precision")
        picker.click()
        option = page.get_by_role("option", name=label, exact=True)
        if option.count() == 0:  # this GPU cannot do it, and the page says so
            expect(page.get_by_text(re.compile(f"{label}[: ]"))).to_be_visible()
            continue
        option.click()
        expect(picker).to_have_value(re.compile(label))
        before = len(list(server.runs.glob("*/run.json")))
        button(page, "Start run").click()
        wait_until(lambda n=before: len(list(server.runs.glob("*/run.json"))) > n, page, 30)
        wait_until(lambda: run_json(server)["status"] == "finished", page, 60)
        expect(page.get_by_test_id("status")).to_contain_text("Finished", timeout=TRAINS_MS)
        config = run_json(server)["config"]
        assert (config["device"], config["precision"]) == (uuid, precision)
        expect(page.get_by_test_id("kpi-loss")).to_contain_text("val")
        used.append(precision)
    assert {"fp32", "fp16"} <= set(used)


def test_the_memory_chart_is_whole_and_the_memory_buttons_act_on_it(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page(
        "/?workload=memory_stress&precision=fp16&epochs=5000&width=8&image_size=32&batch_size=128"
    )
    start(page)
    button(page, "Time").click()
    for name in ("allocated", "reserved", "peak allocated"):
        wait_until(lambda n=name: _rises(memory_line(page, n)), page, 60)
    wait_until(lambda: points(page, "memory") > 20 and points(page) > 5, page, 60)
    lines = memory_lines(page)
    assert {re.split(r" [0-9(]", name)[0] for name in lines} == MEMORY
    wait_until(lambda: all(count > 1 for count in memory_lines(page).values()), page, 30)
    legend = page.get_by_test_id("chart-memory").locator(".legend")
    assert "n/a" not in (legend.text_content() or "")
    button(page, "Pause").click()
    expect(page.get_by_test_id("status")).to_contain_text("Paused", timeout=TRAINS_MS)
    button(page, "Empty cache").click()
    expect(events(page, "empty_cache")).to_have_count(1)
    emptied = event(server, "empty_cache").data
    before, after = emptied["before"]["memory/reserved"], emptied["after"]["memory/reserved"]
    assert after < before
    marker = f"reserved {format_bytes(before)} → {format_bytes(after)}"
    expect(page.get_by_test_id("events")).to_contain_text(marker)
    expect(page.get_by_test_id("kpi-reserved")).to_contain_text(format_bytes(after))
    wait_until(lambda: _falls_to(memory_line(page, "reserved"), before, after), page, 30)
    button(page, "Reset peak stats").click()
    expect(events(page, "reset_peaks")).to_have_count(1)
    reset = event(server, "reset_peaks").data
    peak = reset["after"]["memory/peak_allocated"]
    assert peak == reset["after"]["memory/allocated"] < reset["before"]["memory/peak_allocated"]
    expect(page.get_by_test_id("kpi-peak")).to_contain_text(format_bytes(peak))
    highest = reset["before"]["memory/peak_allocated"]
    wait_until(lambda: _falls_to(memory_line(page, "peak allocated"), highest, peak), page, 30)
    assert tile(page, "allocated") == tile(page, "peak")
    button(page, "Resume").click()
    expect(page.get_by_test_id("status")).to_contain_text("Running")
    wait_until(lambda: tile(page, "allocated") != tile(page, "peak"), page, 60)
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped", timeout=TRAINS_MS)


def _rises(values: list[float]) -> bool:
    return len(values) > 1 and values[0] < values[-1]


def _falls_to(values: list[float], before: float, after: float) -> bool:
    """Return True if a line in MiB fell from `before` to `after`, in bytes, and stays there."""
    highest, last = max(values) * 2**20, values[-1] * 2**20
    return highest >= before * 0.999 and last == pytest.approx(after, rel=1e-3)


def test_filling_the_gpu_is_explained_and_survived(open_page: OpenPage, server: Server) -> None:
    page = open_page(f"/?workload=memory_stress&{TOO_LARGE}")
    start(page, "Failed")
    status = page.get_by_test_id("status")
    expect(status).to_contain_text("memory")
    expect(status).to_contain_text("batch size")
    expect(events(page, "oom")).to_have_count(1)
    pid = server.process.pid
    choose(page, "Workload", "Linear regression")
    expect(page).to_have_url(re.compile("workload=linear"))
    epochs = page.get_by_label("Epochs", exact=True).first
    expect(epochs).to_have_value("400")
    epochs.fill("2")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("epochs=2"))
    start(page, "Finished")
    assert (run_json(server)["status"], run_json(server)["pid"]) == ("finished", pid)
    expect(status).to_contain_text("Finished")
    expect(page.get_by_test_id("kpi-allocated")).to_contain_text("of")


def test_the_breakdown_shows_another_process(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    with window(browser) as page:
        page.goto(f"{server.url}/?workload=digits_mlp&epochs=5000&optimizer=adamw")
        expect(button(page, "Start run")).to_be_enabled(timeout=TRAINS_MS)
        start(page)
        open_memory(page)
        wait_until(lambda: {"other processes", "parameters"} <= set(table(page)), page, 60)
        alone = table(page)
        assert alone["parameters"] > 0
        assert alone["optimizer state"] > alone["parameters"]
        assert alone["this process outside PyTorch"] > 0
        environment = os.environ | small_gpus(tmp_path)
        command = [sys.executable, "-c", HOLD]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            grown = alone["other processes"] + HELD
            wait_until(lambda: table(page)["other processes"] >= 0.99 * grown, page, 30)
            wait_until(lambda: pids(server) == {other.pid}, page, 30)
            expect(page.get_by_test_id("stDataFrame")).to_have_count(2, timeout=30_000)
            assert table(page)["parameters"] == alone["parameters"]
            other.kill()
        wait_until(lambda: table(page)["other processes"] < grown, page, 30)
        wait_until(lambda: "parameters" in areas(page), page, 30)
        button(page, "Stop").click()
        expect(page.get_by_test_id("status")).to_contain_text("Stopped", timeout=TRAINS_MS)


def pids(server: Server) -> set[int]:
    """The processes on the training's GPU but the training itself, as run.json lists them."""
    told = run_json(server)
    listed = told.get("gpu_processes", {}).get(told["config"]["device"], [])
    return {process["pid"] for process in listed} - {told["pid"]}
