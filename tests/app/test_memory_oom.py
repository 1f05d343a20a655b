"""Why memory ran out, on the memory page and on Live, with the button that tries again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dashboard.services import Services
from stepscope.memory.oom.record import OomRecord, OomReport
from stepscope.run import RunStatus
from tests.support.app_page import GPU, OpenPage, header, record, text_of
from tests.support.oom_records import FULL, PIECES
from trainer.config import RunConfig, Workload, defaults

CONFIG = replace(defaults(Workload.MEMORY_STRESS), batch_size=16, gradient_accumulation_steps=2)


def short_of_memory(
    root: Path,
    last: OomRecord = PIECES,
    *,
    ended: bool = True,
    config: RunConfig = CONFIG,
    **more: Any,
) -> Path:
    """A run that memory has ended, or, not `ended`, one whose script went on."""
    status = RunStatus.FAILED if ended else RunStatus.FINISHED
    folder = record(root, "short", status, config=config.to_dict(), **more)
    report = OomReport(last=last, seen=3, ended=ended)
    (folder / "oom.json").write_text(json.dumps(asdict(report)))
    return folder


def test_the_case_its_proof_and_what_to_do_are_shown(page: OpenPage, tmp_path: Path) -> None:
    stack = ("/usr/lib/torch/nn/linear.py:3 forward", "/home/me/train.py:7 step")
    short_of_memory(tmp_path, replace(PIECES, stack=stack))
    app = page(run="short", tab="memory")
    codes = [code.value for code in app.code]
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True" in code for code in codes)
    assert any(stack[-1] in code for code in codes)


def test_a_caught_failure_with_markup_is_told_and_cannot_be_retried(
    page: OpenPage, tmp_path: Path
) -> None:
    odd = replace(FULL, allocator="<img> | [x](http://a)", phase="**bold**")
    folder = short_of_memory(tmp_path, odd, ended=False)
    app = page(run="short", tab="memory")
    assert r"\<img\> \| \[x\](http\:" in text_of(app)
    assert r"\*\*bold\*\*" in text_of(app)
    assert header(app)["retry"] is None
    (folder / "oom.json").write_text('{"last": {"ts": "<b>*x*"}}')
    app = page(run="short", tab="memory")
    assert any("last.ts" in warning.value for warning in app.warning)
    record(tmp_path, "other")
    assert not page(run="other", tab="memory").warning


@pytest.mark.parametrize(
    ("changes", "reason"), [({"batch_size": 1}, "batch"), ({"device": GPU.id}, GPU.id), ({}, "run")]
)
def test_what_cannot_be_retried_has_a_reason(
    page: OpenPage,
    tmp_path: Path,
    server: Services,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(server, "active_id", lambda: "another")
    short_of_memory(tmp_path, FULL, config=replace(CONFIG, **changes))
    assert reason in header(page(run="short"))["retry"]["refused"]
