"""The poll answers only what is new, at a size that does not grow with the run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.charts import series
from dashboard.charts.run_view import state as state_of
from dashboard.charts.series import SeriesCursor
from stepscope.run import RunInfo, RunStatus
from stepscope.store import STORE_NAME, SeriesBlock, StoreReader, StoreWriter
from stepscope.store.blocks import Event
from tests.support.run_folders import block_of_rows

NAN, INF = float("nan"), float("inf")


def fill(
    folder: Path, rows: int, keys: tuple[str, ...] = ("train/loss", "train/lr")
) -> StoreWriter:
    writer = StoreWriter(folder / STORE_NAME)
    steps = np.arange(rows, dtype=float)
    block = SeriesBlock.raw(keys, 50 + steps, steps, np.vstack([steps] * len(keys)))
    with writer.transaction():
        writer.append("steps", "", block)
    return writer


def answer(
    folder: Path,
    cursors: dict[str, SeriesCursor] | None = None,
    more: bool = False,
    **run_info: Any,
) -> dict[str, Any]:
    run = RunInfo(folder, RunStatus.RUNNING, None, 0.0, {"created": 50.0, **run_info})
    with StoreReader(folder) as reader:
        found = series.update(reader, run, cursors or {}, 0, more)
    json.dumps(found, allow_nan=False)
    return found


def timed(ts: float, step: int, samples: int, seconds: float) -> tuple[float, int, Any]:
    return ts, step, {"perf/samples_per_sec": samples / seconds, "perf/step_time": seconds}


VALIDATED = (68.0, 20, {"val/loss": 1.0})
EPOCH = [timed(62.0 + n / 10, 10 + n, 128, 0.1) for n in range(10)]
SHORT = timed(62.95, 20, 16, 0.05)


@pytest.mark.parametrize(
    ("rows", "rate", "step_time"),
    [
        (  # not that of an epoch's short last batch, nor of the epoch before
            [*[timed(60 + n / 10, n, 9000, 0.1) for n in range(10)], *EPOCH, SHORT, VALIDATED],
            (10 * 128 + 16) / 1.05,
            1.05 / 11,
        ),
        ([timed(60.0, 1, 40, 4.0), timed(68.0, 3, 20, 5.0)], 4, 5),
        ([timed(60.0 + n / 5, n, 10, 0.1 * (1 + n % 2)) for n in range(5)], 10 / 0.14, 0.14),
        ([(60.0, 1, {"perf/samples_per_sec": 7.0})], 7, None),
    ],
    ids=["the last second", "longer than a second", "same second for both", "no step time"],
)
def test_rate_and_step_time_are_of_the_last_second_of_timed_steps(
    tmp_path: Path, rows: list[Any], rate: float, step_time: float | None
) -> None:
    write(tmp_path, rows)
    last = answer(tmp_path)["series"]["steps"]["last"]
    assert last["perf/samples_per_sec"] == pytest.approx(rate, rel=1e-5)
    assert last.get("perf/step_time") == (step_time and pytest.approx(step_time, rel=1e-5))


@pytest.mark.parametrize(("rows", "bucket"), [(500, 1), (501, 2), (1_000_000, 2048)])
def test_an_answer_does_not_grow_with_the_run(tmp_path: Path, rows: int, bucket: int) -> None:
    fill(tmp_path, rows).close()
    whole = answer(tmp_path)["series"]["steps"]
    assert (whole["reset"], whole["end"], whole["bucket"]) == (True, rows, bucket)
    assert len(whole["t"]) == -(-rows // bucket)
    assert whole["v"]["train/loss"].get("max", whole["t"])[-1] == rows - 1
    assert whole["last"]["train/loss"] == rows - 1, "exact, not a bucket's mean"
    coarser = SeriesCursor(rows, 2 * bucket)  # the client keeps its larger buckets
    assert series.span(rows, coarser) == (rows, rows, 2 * bucket, False)
    found = answer(tmp_path, {"steps": SeriesCursor(rows - 12, bucket)})
    assert len(json.dumps(found)) < 1500
    found = answer(tmp_path, {"steps": SeriesCursor(rows, bucket)})
    assert len(found["series"]["steps"]["t"]) <= 1  # of an unfinished bucket
    assert len(json.dumps(found)) < 800


@pytest.mark.parametrize(
    ("known", "first", "minima"), [(2997, 2992, [2992, 3000]), (3001, 3000, [3000])]
)
def test_rows_replace_the_unfinished_bucket_also_after_a_lost_frame(
    tmp_path: Path, known: int, first: int, minima: list[int]
) -> None:
    fill(tmp_path, 3001).close()
    with closing(sqlite3.connect(tmp_path / STORE_NAME)) as store, store:
        store.execute("DELETE FROM frames WHERE level = 0 AND first = 2048")
    steps = answer(tmp_path, {"steps": SeriesCursor(known, 8)})["series"]["steps"]
    assert (steps["first"], steps["reset"]) == (first, False)
    assert steps["v"]["train/loss"]["min"] == minima


def test_a_client_far_behind_or_of_another_run_gets_an_overview(tmp_path: Path) -> None:
    fill(tmp_path, 3000).close()
    assert answer(tmp_path, {"steps": SeriesCursor(10, 8)})["series"]["steps"]["reset"]
    assert answer(tmp_path, {"steps": SeriesCursor(9999, 8)})["series"]["steps"]["reset"]


def write(folder: Path, rows: list[Any]) -> None:
    writer = StoreWriter(folder / STORE_NAME)
    with writer.transaction():
        writer.append("steps", "", block_of_rows(rows))
    writer.close()


def log(folder: Path, losses: Sequence[float | None]) -> None:
    write(
        folder,
        [
            (60.0 + i, i, {"train/loss": loss, "val/loss": 1.0 if i == 0 else None})
            for i, loss in enumerate(losses)
        ],
    )


def test_values_that_json_has_no_word_for_are_named(tmp_path: Path) -> None:
    log(tmp_path, [0.5, None, INF, NAN, -INF])
    steps = answer(tmp_path)["series"]["steps"]
    odd = [None, None, "Infinity", "NaN", "-Infinity"]
    assert steps["v"] == {
        "train/loss": {"mean": [0.5, None, None, None, None], "odd": odd},
        "val/loss": {"mean": [1, None, None, None, None]},
    }
    assert steps["last"] == {"train/loss": "-Infinity", "val/loss": 1}


def test_buckets_are_of_finite_values_and_count_the_others(tmp_path: Path) -> None:
    log(tmp_path, [1.0, INF, NAN, 5.0] * 250)
    loss = answer(tmp_path)["series"]["steps"]["v"]["train/loss"]
    counts = {"count": [1, 1] * 250, "odd": [1, 1] * 250}
    assert loss == dict.fromkeys(("mean", "min", "max"), [1, 5] * 250) | counts


def test_a_window_gives_detail(tmp_path: Path) -> None:
    fill(tmp_path, 100_000).close()
    run = RunInfo(tmp_path, RunStatus.FINISHED, None, 0.0, {"created": 50.0})
    with StoreReader(tmp_path) as reader:
        by_step = series.window(reader, run, "step", 500, 599)["steps"]
        by_time = series.window(reader, run, "time", 500, 599)["steps"]
    assert by_step["bucket"] == 1
    assert by_step["s"][0] == 499  # one more on either side
    assert by_step["s"][-1] == 600
    assert by_time["t"] == by_step["t"]


def test_epochs_do_not_crowd_out_other_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "MAX_EVENTS", 3)
    kinds = ["mark", "epoch", "alert", *["epoch"] * 5, "checkpoint"]
    run = RunInfo(tmp_path, RunStatus.RUNNING, None, 0.0, {"created": 0.0})
    with closing(StoreWriter(tmp_path / STORE_NAME)) as writer, writer.transaction():
        for number, kind in enumerate(kinds):
            writer.add_event(Event(float(number), number, 1, kind, "", {}))
    with StoreReader(tmp_path) as reader:
        found = [event["id"] for event in series.events(reader, run, 0)]
        assert found == [1, 3, 7, 8, 9]
        assert [event["id"] for event in series.events(reader, run, 7)] == [8, 9]


@pytest.mark.parametrize(
    "text", ["a~b~c", "a~1~3", "a~1~0", "a~1", "a~-1~1", "a~1~" + "9" * 30, "~1~²"]
)
def test_malformed_cursors_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="since"):
        series.parse_cursors(text)
    valid = {"steps": SeriesCursor(5, 2), "devices/GPU-a": SeriesCursor(0, 1)}
    assert series.parse_cursors("steps~5~2,devices/GPU-a~0~1") == valid
    assert series.parse_cursors("") == {}


def test_the_optimizers_lines_are_sent_while_somebody_looks(tmp_path: Path) -> None:
    keys = ("train/loss", "train/lr", "train/lr.optimizer1")
    fill(tmp_path, 100, keys).close()
    folded = answer(tmp_path)["series"]["steps"]
    assert set(folded["v"]) == {"train/loss"}
    assert folded["last"]["train/lr"] == 99, "the newest value stands beside the folded charts"
    for names, count in ((["Adam"], 2), (["Adam", "SGD"], 3)):
        shown = answer(tmp_path, more=True, optimizers=names)["series"]["steps"]["v"]
        assert set(shown) == set(keys[:count])


def test_a_scripts_own_metrics_and_the_losses_of_its_optimizers_are_sent(tmp_path: Path) -> None:
    many = tuple(f"train/m{n}" for n in range(60))
    fill(tmp_path, 100, ("train/loss", "train/loss.optimizer1", *many)).close()
    assert set(answer(tmp_path)["series"]["steps"]["v"]) == {"train/loss"}
    steps = answer(tmp_path, custom=list(many), optimizers=["Adam", "Adam"])["series"]["steps"]
    assert set(steps["v"]) == {"train/loss", "train/loss.optimizer1", *many[:12]}, "a limit"
    assert steps["last"]["train/m0"] == 99


def state(status: RunStatus, age_s: float = 0.0, **run_info: Any) -> dict[str, Any]:
    run = RunInfo(Path("run"), status, None, age_s, {"created": 50.0, **run_info})
    return state_of(run)


@pytest.mark.parametrize(
    ("status", "age_s", "run_info", "warning"),
    [
        (RunStatus.RUNNING, 1.0, {"dropped": 0}, None),
        (RunStatus.FINISHED, 0.0, {"dropped": 1234}, "1,234 steps"),
        (RunStatus.PAUSED, 12.4, {}, "No update for 12 s."),
        (RunStatus.FINISHED, 1e6, {}, None),
        (RunStatus.RUNNING, 1.0, {"problem": "Disk full."}, "Disk full."),
    ],
)
def test_warnings_about_the_recording(
    status: RunStatus, age_s: float, run_info: dict[str, Any], warning: str | None
) -> None:
    found = state(status, age_s, **run_info)["warnings"]
    assert [text[: len(warning or "")] for text in found] == ([] if warning is None else [warning])


def test_a_script_that_has_not_stepped_yet_says_so_and_an_epoch_of_0_is_none() -> None:
    found = state(RunStatus.PENDING, kind="watch", step=0, epoch=0)
    assert "first optimizer step" in found["reason"]
    assert found["progress"]["epoch"] is None
    assert found["progress"]["step"] == 0
    assert state(RunStatus.PENDING)["reason"] is None
