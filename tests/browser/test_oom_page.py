"""A run that memory has ended: why, on Live and on Memory, and one click that tries again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from playwright.sync_api import Page, expect

from stepscope.memory.oom.record import OomReport
from stepscope.run import RunStatus, read_run, run_folders
from tests.support.oom_records import PIECES
from tests.support.recorded_runs import rows, write_run
from tests.support.server import Server
from trainer.config import Workload, defaults

CONFIG = replace(defaults(Workload.LINEAR), batch_size=32, epochs=3)


def short_of_memory(server: Server) -> None:
    server.runs.mkdir(exist_ok=True)
    told = {
        "status": RunStatus.FAILED.value,
        "created": time.time() - 60,
        "name": "linear",
        "reason": "The GPU ran out of memory (tried to allocate 300 MiB): fragmentation. Do this.",
        "config": CONFIG.to_dict(),
    }
    folder = write_run(server.runs / "short", told, steps=rows(0.001))
    frames = ("/lib/site-packages/torch/nn/linear.py:3 forward", "/home/me/train.py:7 step")
    record = replace(PIECES, stack=frames)
    report = OomReport(last=record, ended=True)
    (folder / "oom.json").write_text(json.dumps(asdict(report)))


def test_why_memory_ran_out_and_one_click_to_try_again(
    server: Server, open_page: Callable[..., Page]
) -> None:
    short_of_memory(server)
    page = open_page("/?run=short", expected="404")  # Streamlit's own, of a page opened by a link
    line = page.get_by_test_id("verdict")
    expect(line).to_be_visible()
    expect(line).to_contain_text("300 MiB")
    again = page.get_by_role("button", name=re.compile("^Retry"))
    expect(again).to_contain_text("16 × 2")
    line.get_by_role("button", name="Memory tab →").click()
    page.wait_for_url("**run=short&tab=memory")
    expect(page.locator(".st-key-oom")).to_contain_text("300 MiB")
    assert [folder.name for folder in run_folders(server.runs)] == ["short"]
    again.click()
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    (started,) = [one for one in run_folders(server.runs) if one.name != "short"]
    settings = read_run(started).run_json["config"]
    assert (settings["batch_size"], settings["gradient_accumulation_steps"]) == (16, 2)
    assert {**settings, "batch_size": 32, "gradient_accumulation_steps": 1} == CONFIG.to_dict()
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
