"""The poll answers only what is new, at a size that does not grow with the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.charts import series
from dashboard.charts.series import SeriesCursor, keys_of
from stepscope.run import RunInfo, RunStatus
from stepscope.store import STORE_NAME, SeriesBlock, StoreReader, StoreWriter
from stepscope.store.blocks import RECORDED_NAN

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


@pytest.mark.parametrize(
    ("rows", "bucket"), [(0, 1), (500, 1), (501, 2), (1000, 2), (1001, 4), (10**7, 32768)]
)
def test_fitting_bucket_is_the_smallest_that_fits(rows: int, bucket: int) -> None:
    assert series.fitting_bucket(rows) == bucket


def test_first_answer_is_an_overview(tmp_path: Path) -> None:
    fill(tmp_path, 3000).close()
    found = answer(tmp_path)
    assert found["progress"]["step"] == 2999
    steps = found["series"]["steps"]
    assert (steps["reset"], steps["first"], steps["end"], steps["bucket"]) == (True, 0, 3000, 8)
    assert len(steps["t"]) == 375
    assert set(steps["v"]) == {"train/loss"}  # train/lr is folded away
    assert steps["v"]["train/loss"]["max"][-1] == 2999
    assert steps["t"][-1] == 2999
    assert steps["last"] == {
        "train/loss": 2999,
        "train/lr": 2999,
    }, "exact, not a bucket's mean"


def newest(folder: Path, rows: list[Any]) -> dict[str, Any]:
    """The newest values of a run with these rows."""
    writer = StoreWriter(folder / STORE_NAME)
    with writer.transaction():
        writer.append("steps", "", SeriesBlock.from_rows(rows))
    writer.close()
    last: dict[str, Any] = answer(folder)["series"]["steps"]["last"]
    return last


def rate(folder: Path, rows: list[Any]) -> Any:
    return newest(folder, rows)["perf/samples_per_sec"]


def timed(ts: float, step: int, samples: int, seconds: float) -> tuple[float, int, Any]:
    return ts, step, {"perf/samples_per_sec": samples / seconds, "perf/step_time": seconds}


def test_the_newest_rate_is_that_of_the_last_second_not_of_an_epochs_short_last_batch(
    tmp_path: Path,
) -> None:
    long_ago = [timed(60.0 + n / 10, n, 9000, 0.1) for n in range(10)]
    epoch = [timed(62.0 + n / 10, 10 + n, 128, 0.1) for n in range(10)]
    short = timed(62.95, 20, 16, 0.05)
    validated: tuple[float, int, Any] = (68.0, 20, {"val/loss": 1.0})
    found = rate(tmp_path, [*long_ago, *epoch, short, validated])
    assert found == pytest.approx((10 * 128 + 16) / 1.05, rel=1e-5)


def test_the_last_second_is_read_whole_after_a_stall(tmp_path: Path) -> None:
    before = [timed(60.0 + n / 1000, n, 32, 0.001) for n in range(500)]
    after = [timed(61.0 + n / 1000, 501 + n, 32, 0.001) for n in range(10)]
    found = rate(tmp_path, [*before, timed(60.999, 500, 32, 0.5), *after])
    inside = 500 - 10  # those before the stall and within a second of the last row
    assert found == pytest.approx(32 * (inside + 11) / (0.001 * (inside + 10) + 0.5), rel=0.01)


def test_the_last_second_ends_with_the_last_timed_step(tmp_path: Path) -> None:
    steps = [timed(60.0 + n / 100, n, 100 if n < 50 else 10, 0.01) for n in range(100)]
    validated: tuple[float, int, Any] = (66.0, 99, {"val/loss": 1.0})
    assert rate(tmp_path, [*steps, validated]) == pytest.approx(5500)


@pytest.mark.parametrize(
    ("rows", "rate", "step_time"),
    [
        ([timed(60.0, 1, 40, 4.0), timed(63.0, 2, 30, 3.0), timed(68.0, 3, 20, 5.0)], 4, 5),
        ([timed(60.0 + n / 5, n, 10, 0.1 * (1 + n % 2)) for n in range(5)], 10 / 0.14, 0.14),
        ([(60.0, 1, {"perf/samples_per_sec": 7.0})], 7, None),
    ],
    ids=["longer than a second", "same second for both", "no step time"],
)
def test_rate_and_step_time_are_of_the_same_last_second(
    tmp_path: Path, rows: list[Any], rate: float, step_time: float | None
) -> None:
    last = newest(tmp_path, rows)
    assert last["perf/samples_per_sec"] == pytest.approx(rate, rel=1e-5)
    assert last.get("perf/step_time") == (step_time and pytest.approx(step_time))


def test_nothing_new_is_nearly_no_bytes(tmp_path: Path) -> None:
    fill(tmp_path, 3000).close()
    found = answer(tmp_path, {"steps": SeriesCursor(3000, 8)})
    assert found["series"]["steps"]["t"] == []
    assert len(json.dumps(found)) < 700


def test_new_rows_replace_the_unfinished_bucket(tmp_path: Path) -> None:
    fill(tmp_path, 3001).close()
    steps = answer(tmp_path, {"steps": SeriesCursor(2997, 8)})["series"]["steps"]
    assert (steps["first"], steps["reset"]) == (2992, False)
    assert steps["v"]["train/loss"]["min"] == [2992, 3000]


def test_a_client_far_behind_or_of_another_run_gets_an_overview(tmp_path: Path) -> None:
    fill(tmp_path, 3000).close()
    assert answer(tmp_path, {"steps": SeriesCursor(10, 8)})["series"]["steps"]["reset"]
    assert answer(tmp_path, {"steps": SeriesCursor(9999, 8)})["series"]["steps"]["reset"]


@pytest.mark.parametrize("rows", [600, 60_000, 1_000_000])
def test_the_answer_does_not_grow_with_the_run(tmp_path: Path, rows: int) -> None:
    fill(tmp_path, rows).close()
    bucket = series.fitting_bucket(rows)
    found = answer(tmp_path, {"steps": SeriesCursor(rows - 12, bucket)})
    assert len(json.dumps(found)) < 1500


def log(folder: Path, losses: Sequence[float | None]) -> None:
    writer = StoreWriter(folder / STORE_NAME)
    with writer.transaction():
        rows = [
            (60.0 + i, i, {"train/loss": loss, "val/loss": 1.0 if i == 0 else None})
            for i, loss in enumerate(losses)
        ]
        writer.append("steps", "", SeriesBlock.from_rows(rows))
    writer.close()


def test_values_that_json_has_no_word_for_are_named(tmp_path: Path) -> None:
    log(tmp_path, [0.5, None, INF, NAN, -INF])
    steps = answer(tmp_path)["series"]["steps"]
    odd = [None, None, "Infinity", "NaN", "-Infinity"]
    assert steps["v"] == {
        "train/loss": {"mean": [0.5, None, None, None, None], "odd": odd},
        "val/loss": {"mean": [1, None, None, None, None]},
    }
    assert steps["last"] == {"train/loss": "-Infinity", "val/loss": 1}
    assert steps["since"] == {"train/loss": 2}


def test_buckets_are_of_finite_values_and_count_the_others(tmp_path: Path) -> None:
    log(tmp_path, [1.0, INF, NAN, 5.0] * 250)
    loss = answer(tmp_path)["series"]["steps"]["v"]["train/loss"]
    assert loss == {
        "mean": [1, 5] * 250,
        "min": [1, 5] * 250,
        "max": [1, 5] * 250,
        "odd": [1, 1] * 250,
    }


@pytest.mark.parametrize("rows", [700, 20_000, 300_000])
def test_a_tile_knows_since_when_at_any_length(tmp_path: Path, rows: int) -> None:
    for place, (finite, gap) in enumerate([(rows // 3, 0), (rows // 3, 1), (rows - 690, 650)]):
        folder = tmp_path / str(place)
        folder.mkdir()
        values = np.full(rows, RECORDED_NAN)
        values[: finite + 1] = 1.0
        values[finite // 2] = INF  # odd once before, in a bucket of its own or in the same
        values[finite - 1] = RECORDED_NAN
        values[finite + 1 : finite + 1 + gap] = np.nan  # missing
        writer = StoreWriter(folder / STORE_NAME)
        steps = np.arange(rows, dtype=float)
        with writer.transaction():
            writer.append(
                "steps", "", SeriesBlock.raw(("train/loss",), 50 + steps, steps, values[None])
            )
        writer.close()
        found = answer(folder)["series"]["steps"]["since"]
        assert found == {"train/loss": finite + 1 + gap}


def test_a_window_gives_detail(tmp_path: Path) -> None:
    fill(tmp_path, 100_000).close()
    run = RunInfo(tmp_path, RunStatus.FINISHED, None, 0.0, {"created": 50.0})
    with StoreReader(tmp_path) as reader:
        by_step = series.window(reader, run, "step", 500, 599)["series"]["steps"]
        by_time = series.window(reader, run, "time", 500, 599)["series"]["steps"]
    assert by_step["bucket"] == 1
    assert by_step["s"][0] == 499  # one more on either side
    assert by_step["s"][-1] == 600
    assert by_time["t"] == by_step["t"]


def test_numbers_are_short_but_whole_bytes_stay_whole() -> None:
    assert series.rounded([0.0, 1 / 3, 1.5e11, -2.0]) == [0, 0.333333, 150000000000, -2]


@pytest.mark.parametrize(
    "text", ["x", "a~b~c", "a~1~3", "a~1~0", "a~1", "a~-1~1", "a~1~" + "9" * 30, "~1~²"]
)
def test_malformed_cursors_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="since"):
        series.parse_cursors(text)
    valid = {"steps": SeriesCursor(5, 2), "devices/GPU-a": SeriesCursor(0, 1)}
    assert series.parse_cursors("steps~5~2,devices/GPU-a~0~1") == valid
    assert series.parse_cursors("") == {}


def test_the_optimizers_lines_are_sent_while_somebody_looks(tmp_path: Path) -> None:
    keys = ("train/loss", "train/lr", "train/lr.group1", "train/lr.optimizer1", "train/grad_norm")
    fill(tmp_path, 100, keys).close()
    assert set(answer(tmp_path)["series"]["steps"]["v"]) == {"train/loss"}
    shown = answer(tmp_path, more=True)["series"]["steps"]["v"]
    assert set(shown) == set(keys) - {"train/lr.optimizer1"}  # this run has one optimizer
    both = answer(tmp_path, more=True, optimizers=["Adam", "SGD"])["series"]["steps"]["v"]
    assert set(both) == set(keys)


def test_folded_charts_are_sent_when_asked_for_and_a_recording_folds_nothing() -> None:
    for kind, asked, drawn in (
        ("init", False, False),
        ("init", True, True),
        ("record", False, True),
    ):
        run = RunInfo(Path("run"), RunStatus.RUNNING, None, 0.0, {"created": 0.0, "kind": kind})
        keys = keys_of(run, asked)
        assert ("gpu/temp" in keys.drawn) is drawn
        assert "gpu/temp" in keys.last, "the newest value stands beside the folded charts"
        assert "gpu/power" in keys.drawn


def test_a_scripts_own_metrics_and_the_losses_of_its_optimizers_are_sent(tmp_path: Path) -> None:
    fill(tmp_path, 100, ("train/loss", "train/loss.optimizer1", "train/own", "train/other")).close()
    assert set(answer(tmp_path)["series"]["steps"]["v"]) == {"train/loss"}
    found = answer(tmp_path, custom=["train/own"], optimizers=["Adam", "Adam"])
    assert set(found["series"]["steps"]["v"]) == {
        "train/loss",
        "train/loss.optimizer1",
        "train/own",
    }
    assert found["series"]["steps"]["last"]["train/own"] == 99


def test_the_number_of_user_defined_metrics_is_limited(tmp_path: Path) -> None:
    keys = tuple(f"train/m{n}" for n in range(60))
    fill(tmp_path, 100, keys).close()
    steps = answer(tmp_path, custom=list(keys))["series"]["steps"]
    assert len(steps["v"]) == len(steps["last"]) == 12


def state(status: RunStatus, age_s: float = 0.0, **run_info: Any) -> dict[str, Any]:
    run = RunInfo(Path("run"), status, None, age_s, {"created": 50.0, **run_info})
    return series.state(run)


def test_what_was_not_recorded_is_said() -> None:
    assert state(RunStatus.RUNNING, dropped=0)["warnings"] == []
    (many,) = state(RunStatus.FINISHED, dropped=1234)["warnings"]
    assert many.startswith("1,234 steps or events were not recorded:")
    (one,) = state(RunStatus.FINISHED, dropped=1)["warnings"]
    assert one.startswith("1 step or event was not recorded:")
    (gpu,) = state(RunStatus.RUNNING, dropped_values=3)["warnings"]
    assert gpu.startswith("3 steps lack GPU values")


def test_a_live_run_whose_folder_stands_still_is_said_and_an_ended_one_is_not() -> None:
    for status in (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PAUSED):
        (sentence,) = state(status, 12.4)["warnings"]
        assert sentence.startswith("No update for 12 s.")
    assert state(RunStatus.RUNNING, 200.0)["warnings"][0].startswith("No update for 3 min.")
    assert state(RunStatus.FINISHED, 1e6)["warnings"] == []
    assert state(RunStatus.RUNNING, 1.0, problem="Disk full.")["warnings"] == ["Disk full."]


def test_a_script_that_has_not_stepped_yet_says_so_and_an_epoch_of_0_is_none() -> None:
    found = state(RunStatus.PENDING, kind="watch", step=0, epoch=0)
    assert "first optimizer step" in found["reason"]
    assert found["progress"]["epoch"] is None
    assert found["progress"]["step"] == 0
    assert state(RunStatus.PENDING)["reason"] is None
    assert state(RunStatus.RUNNING, kind="record", step=0)["progress"]["step"] is None
