"""The verdict that the page shows: seldom made, slow to change, and the same for all tabs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dashboard.controls.config_widgets import is_possible
from dashboard.controls.sidebar_groups import PLACES
from dashboard.run_look import RunLook
from dashboard.verdicts import EVERY_S, HOLD_S, KEPT, DisplayedDiagnosis, Verdicts, as_json
from stepscope.bottleneck.classify import BottleneckDiagnosis, BottleneckKind, StepAverages, verdict
from stepscope.bottleneck.recommendations import Recommendation, RunSetup
from stepscope.distributed.stragglers.reader import judged_run
from stepscope.run import RunInfo, RunStatus, read_run
from stepscope.store import StoreReader
from stepscope.store.writer import StoreWriter
from tests.support.javascript import Script, js
from tests.support.recorded_runs import CREATED, rows, write_run
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice

__all__ = ["js"]

CPU = TrainDevice(id="cpu", name="CPU", memory_total=2**34)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ask(clock: Clock) -> Callable[..., BottleneckDiagnosis | None]:
    """Ask for the verdict of a run that is said to be live, unless told otherwise."""
    verdicts = Verdicts(RunLook(judged_run, "", clock), clock)

    def of(folder: Path, status: RunStatus = RunStatus.RUNNING) -> BottleneckDiagnosis | None:
        run: RunInfo = replace(read_run(folder), status=status)
        with StoreReader(folder) as reader:
            return verdicts.of(reader, run, lambda name, value: True)

    return of


def test_a_young_run_has_none_and_then_one(
    tmp_path: Path, clock: Clock, ask: Callable[..., BottleneckDiagnosis | None]
) -> None:
    assert ask(write_run(tmp_path / "a", steps=rows(0.06, count=10))) is None
    found = ask(write_run(tmp_path / "b", steps=rows(0.06)))
    assert found is not None
    assert found.kind is BottleneckKind.INPUT


def test_it_is_made_once_in_a_while_for_all_tabs(
    tmp_path: Path, clock: Clock, ask: Callable[..., BottleneckDiagnosis | None], monkeypatch: Any
) -> None:
    made: list[int] = []
    judge = verdict

    def counted(*given: Any) -> BottleneckDiagnosis:
        made.append(1)
        return judge(*given)

    monkeypatch.setattr("dashboard.verdicts.verdict", counted)
    folder = write_run(tmp_path / "r", steps=rows(0.06))
    for _ in range(10):
        assert ask(folder) is not None
    assert len(made) == 1
    clock.now += EVERY_S
    ask(folder)
    assert len(made) == 2


def test_the_verdict_of_an_ended_run_is_made_once_and_is_the_last(
    tmp_path: Path, clock: Clock, ask: Callable[..., BottleneckDiagnosis | None], monkeypatch: Any
) -> None:
    folder = write_run(tmp_path / "r", steps=rows(0.06))
    assert ask(folder, RunStatus.FINISHED) is not None
    monkeypatch.setattr("dashboard.verdicts.recent_figures", lambda *_: pytest.fail("read again"))
    clock.now += 1000
    assert ask(folder, RunStatus.FINISHED) is not None


def test_a_recording_has_none(
    tmp_path: Path, ask: Callable[..., BottleneckDiagnosis | None]
) -> None:
    assert ask(write_run(tmp_path / "r", {"kind": "record"}, steps=rows(0.06))) is None


def test_only_the_newest_runs_are_kept(
    tmp_path: Path, ask: Callable[..., BottleneckDiagnosis | None], monkeypatch: Any
) -> None:
    verdicts = Verdicts(RunLook(judged_run, ""))
    folder = write_run(tmp_path / "r", steps=rows(0.06))
    run = read_run(folder)
    with StoreReader(folder) as reader:
        for number in range(KEPT + 10):
            other = replace(run, folder=tmp_path / str(number))
            verdicts.of(reader, other, lambda name, value: True)
    assert len(verdicts._shown) == KEPT


def found_as(kind: BottleneckKind) -> BottleneckDiagnosis:
    return BottleneckDiagnosis(kind=kind, text=kind.value, next=Recommendation(text="Try it."))


def test_another_verdict_must_be_found_twice_and_wait_its_turn() -> None:
    shown = DisplayedDiagnosis(looked=0)
    shown.settle(found_as(BottleneckKind.INPUT), 0)
    seen = []
    # Between two kinds every EVERY_S seconds: what is shown must not follow.
    for turn, kind in enumerate([BottleneckKind.COMPUTE, BottleneckKind.INPUT] * 10):
        shown.settle(found_as(kind), (turn + 1) * EVERY_S)
        assert shown.verdict is not None
        seen.append(shown.verdict.kind)
    assert set(seen) == {BottleneckKind.INPUT}
    began = 20 * EVERY_S
    shown.settle(found_as(BottleneckKind.COMPUTE), began + EVERY_S)
    shown.settle(found_as(BottleneckKind.COMPUTE), began + 2 * EVERY_S)
    assert shown.verdict is not None
    assert shown.verdict.kind is BottleneckKind.COMPUTE
    shown.settle(found_as(BottleneckKind.UNCLEAR), began + 3 * EVERY_S)
    shown.settle(found_as(BottleneckKind.UNCLEAR), began + 3 * EVERY_S + 1)
    assert shown.verdict is not None  # held for HOLD_S, also against saying nothing
    shown.settle(found_as(BottleneckKind.UNCLEAR), began + 2 * EVERY_S + HOLD_S)
    assert shown.verdict is None
    shown.settle(found_as(BottleneckKind.INPUT), began + 100)
    assert shown.verdict is None
    shown.settle(found_as(BottleneckKind.INPUT), began + 100 + EVERY_S)
    assert shown.verdict is not None


def test_its_numbers_change_only_so_often() -> None:
    shown = DisplayedDiagnosis(looked=0)
    shown.settle(replace(found_as(BottleneckKind.INPUT), text="63 %"), 0)
    shown.settle(replace(found_as(BottleneckKind.INPUT), text="64 %"), EVERY_S)
    assert shown.verdict is not None
    assert shown.verdict.text == "63 %"
    shown.settle(replace(found_as(BottleneckKind.INPUT), text="65 %"), HOLD_S)
    assert shown.verdict.text == "65 %"


def test_a_run_whose_loss_became_nan_says_so_after_its_end(
    tmp_path: Path, ask: Callable[..., BottleneckDiagnosis | None]
) -> None:
    """Such a run ended "Finished" without a word on the page."""
    folder = write_run(tmp_path / "nan", steps=rows(0.063))
    writer = StoreWriter(folder / "rank0.sqlite", reopen=True)
    with writer.transaction():
        writer.add_event(CREATED + 1, 7, 0, "nan", "train/loss is NaN from step 7 on", {})
    writer.close()
    found = ask(folder, RunStatus.FINISHED)
    assert found is not None
    assert (found.kind, found.text) == (
        BottleneckKind.NOT_FINITE,
        "train/loss is NaN from step 7 on.",
    )
    assert as_json(found, PLACES) is not None


def test_what_the_browser_gets() -> None:
    waits = StepAverages(steps=50, step_time=0.1, data_wait=0.063)
    ours = verdict(waits, RunSetup(on_gpu=False, own=True, cores=8))
    assert as_json(ours, PLACES) == {
        "kind": "input-bound",
        "text": "Input-bound: 63% of each step waits for data.",
        "setting": {
            "field": "num_workers",
            "value": 4,
            "text": "num_workers 4",
            "place": "Data loading",
        },
    }
    script = as_json(verdict(waits, RunSetup(on_gpu=False, own=False, cores=8)), PLACES)
    assert script is not None
    assert "setting" not in script
    assert "DataLoader" in script["words"]
    assert as_json(None, PLACES) is None


def test_what_this_machine_cannot_do_is_not_proposed() -> None:
    config = RunConfig().to_dict()
    assert is_possible("num_workers", 2, config, [CPU])
    assert not is_possible("precision", "tf32", config, [CPU])
    assert not is_possible("num_workers", 65, config, [CPU])
    assert not is_possible("num_workers", 2, {"batch_size": "many"}, [CPU])


# --- in the browser ----------------------------------------------------------------------------


def test_the_line_has_a_link_words_or_nothing(js: Script) -> None:
    setting = {"field": "pin_memory", "value": True, "text": "pin_memory on"}
    answer = {"verdict": {"kind": "transfer-bound", "text": "T.", "setting": setting}}
    shown = "verdictContent(answer, settings)"
    linked = js(shown, answer=answer, settings={"pin_memory": False})
    assert linked["link"] == "Apply pin_memory on →"
    assert "for the next run" in linked["title"]
    taken = js(shown, answer=answer, settings={"pin_memory": True})
    assert (taken["link"], taken["words"]) == (None, "pin_memory on is set for the next run.")
    threads = {
        "field": "num_threads",
        "value": 2,
        "text": "threads 2",
        "place": "More, CPU threads",
    }
    answer = {"verdict": {"kind": "compute-bound", "text": "T.", "setting": threads}}
    placed = js(shown, answer=answer, settings={"num_threads": 2})["words"]
    assert placed == "threads 2 is set for the next run (sidebar: More, CPU threads)."
    words = js(shown, answer={"verdict": {"kind": "k", "text": "T.", "words": "W."}}, settings=None)
    assert (words["text"], words["words"], words["link"]) == ("T.", "W.", None)
    assert js(shown, answer={"verdict": None}, settings={}) is None
    assert js(shown, answer=None, settings=None) is None


def test_a_verdict_may_name_the_tab_with_its_details(js: Script) -> None:
    answer = {"verdict": {"kind": "out-of-memory", "text": "T.", "words": "W.", "tab": "memory"}}
    assert js("verdictContent(answer, {})", answer=answer) == {
        "text": "T.",
        "words": "W.",
        "link": None,
        "title": None,
        "tab": "memory",
    }
