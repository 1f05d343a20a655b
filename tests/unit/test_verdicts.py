"""The diagnosis on the page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dashboard import run_analyzer
from dashboard.run_analyzer import bottleneck_line, find
from stepscope.diagnosis.results import BottleneckKind, StepAverages
from stepscope.distributed.stragglers.detect import StragglerFinding, StragglerKind
from stepscope.memory.oom.record import OomReport
from stepscope.run import RunStatus, read_run
from stepscope.run_setup import RunSetup
from stepscope.store.blocks import Event
from stepscope.store.writer import StoreWriter
from tests.support.javascript import Script, js
from tests.support.oom_records import PIECES
from tests.support.recorded_runs import CREATED, rows, write_run
from tests.support.step_verdict import verdict
from trainer.config import RunConfig
from trainer.training.config_validation import TrainDevice, is_possible

__all__ = ["js"]

CPU = TrainDevice(id="cpu", name="CPU", memory_total=2**34)


def ask(folder: Path, status: RunStatus = RunStatus.RUNNING) -> dict[str, Any] | None:
    """Return the diagnosis line of a run, live by default."""
    return find(replace(read_run(folder), status=status), [CPU]).line


@pytest.mark.parametrize(
    ("loss", "status", "is_broken"),
    [
        (math.nan, RunStatus.RUNNING, True),
        (0.5, RunStatus.RUNNING, False),
        (0.5, RunStatus.FINISHED, True),
        (math.nan, RunStatus.FAILED, False),
    ],
)
def test_a_loss_that_became_nan_is_the_diagnosis_until_it_is_finite_or_the_run_failed(
    tmp_path: Path, loss: float, status: RunStatus, is_broken: bool
) -> None:
    last = (100.0, 100, {"train/loss": loss})
    folder = write_run(tmp_path / "nan", steps=[*rows(0.063), last])
    writer = StoreWriter(folder / "rank0.sqlite", reopen=True)
    with writer.transaction():
        writer.add_event(Event(CREATED + 1, 7, 0, "nan", "train/loss is NaN from step 7 on", {}))
    writer.close()
    found = ask(folder, status)
    assert found is not None
    assert (found["kind"] == BottleneckKind.NOT_FINITE) is is_broken
    assert ("from step 7 on" in found["text"]) is is_broken


def test_a_straggler_to_act_on_is_the_diagnosis_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = read_run(write_run(tmp_path / "job", {"world_size": 2}, steps=rows(0.06)))
    late = StragglerFinding(StragglerKind.STRAGGLER, "Rank 1 is late.", ranks=(1,), next="Look.")
    for next_step, kind in (("Look.", "straggler"), (None, "input-bound")):
        straggler = replace(late, next=next_step)
        monkeypatch.setattr(run_analyzer, "straggler_of", lambda run, found=straggler: found)
        found = find(job, [CPU])
        assert found.line is not None
        assert found.job is not None
        assert (found.line["kind"], found.job["ranks"]) == (kind, [1])


@pytest.mark.parametrize("ended", [True, False])
def test_only_a_failure_by_memory_names_the_memory_tab(tmp_path: Path, ended: bool) -> None:
    folder = write_run(tmp_path / "a", {"status": "failed"}, steps=rows(0.06))
    (folder / "oom.json").write_text(json.dumps(asdict(OomReport(last=PIECES, ended=ended))))
    found = ask(folder, RunStatus.FAILED)
    assert found is not None
    assert (found["kind"] == "out-of-memory") is (found.get("tab") == "memory") is ended


def test_what_the_browser_gets() -> None:
    waits = StepAverages(steps=50, step_time=0.1, data_wait=0.063)
    ours = verdict(waits, RunSetup(on_gpu=False, own=True, cores=8))
    told = bottleneck_line(ours)
    assert told is not None
    setting = {"field": "num_workers", "value": 4, "text": "num_workers 4", "place": "Data loading"}
    assert (told["kind"], told["setting"]) == ("input-bound", setting)
    script = bottleneck_line(verdict(waits, RunSetup(on_gpu=False, own=False, cores=8)))
    assert script is not None
    assert "setting" not in script
    assert "DataLoader" in script["words"]


def test_what_this_machine_cannot_do_is_not_proposed() -> None:
    config = RunConfig().to_dict()
    assert is_possible("num_workers", 2, config, [CPU])
    assert not is_possible("num_workers", 65, config, [CPU])
    assert not is_possible("num_workers", 2, {"batch_size": "many"}, [CPU])
    elsewhere = config | {"device": "GPU-of-another-machine"}
    assert is_possible("num_workers", 2, elsewhere, [CPU])
    assert not is_possible("cuda_graphs", True, elsewhere, [CPU])


# --- in the browser ----------------------------------------------------------------------------


def test_the_line_has_a_link_words_or_nothing(js: Script) -> None:
    def content(settings: Any = None, **diagnosis: Any) -> Any:
        verdict = {"kind": "transfer-bound", "text": "T.", **diagnosis} if diagnosis else None
        answer = {"verdict": verdict}
        return js("verdictContent(answer, settings)", answer=answer, settings=settings)

    setting = {"field": "pin_memory", "value": True, "text": "pin_memory on"}
    linked = content({"pin_memory": False}, setting=setting)
    assert linked["link"] == "Apply pin_memory on →"
    taken = content({"pin_memory": True}, setting=setting)
    assert (taken["link"], taken["words"]) == (None, "pin_memory on is set for the next run.")
    assert content(words="W.")["words"] == "W."
    assert js("verdictContent(answer, settings)", answer=None, settings=None) is None
