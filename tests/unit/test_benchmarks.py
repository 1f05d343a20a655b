"""The pure parts of the benchmarks: pairing, statistics, parsing, and what counts as met."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    lab_truth,
    lab_truth_workload,
    overhead,
    pairs,
    reader,
    recorder,
    recording_child,
    report,
)
from benchmarks.peers import adapters
from benchmarks.peers import environment as peers
from trainer.workloads.task import TensorSplit


def test_a_ratio_is_to_the_line_between_the_bare_blocks_around() -> None:
    # The machine slows down by 1 s a block: bare alone would show that as a cost of the way.
    times = {"bare": (10.0, 15.0), "x": (11.0, 14.0), "y": (24.0,), "bare_again": (13.0,)}
    taken = {way: iter(values) for way, values in times.items()}
    order = ("bare", "x", "y", "bare_again", "x", "bare")
    found = pairs.ratios([(way, next(taken[way])) for way in order])
    assert found["x"] == pytest.approx([1.0, 1.0])
    assert found["y"] == pytest.approx([2.0])
    # The second bare process is compared with the first alone.
    bare = ("bare", 10.0)
    blocks = [bare, ("bare_again", 6.0), bare, ("bare_again", 5.0), bare]
    assert pairs.ratios(blocks) == {"bare_again": pytest.approx([0.6, 0.5])}
    # A block without a bare one on both sides does not count.
    assert pairs.ratios([("x", 1.0), ("bare", 1.0), ("y", 2.0)]) == {}


def test_every_round_has_each_way_once_and_ends_bare() -> None:
    blocks = pairs.order(["a", "b", "c"], rounds=20, seed=0)
    assert Counter(blocks) == {"bare": 21, "bare_again": 20, "a": 20, "b": 20, "c": 20}
    assert blocks[-1] == "bare"
    seen = {tuple(blocks[at : at + 5]) for at in range(0, 100, 5)}
    assert len(seen) > 3  # the order changes
    assert all(
        len(ratios) == 20 for ratios in pairs.ratios([(way, 1.0) for way in blocks]).values()
    )


def test_an_interval_holds_the_median_and_narrows_with_the_values() -> None:
    few, many = pairs.interval([1.0, 2.0, 3.0]), pairs.interval([1.0, 2.0, 3.0] * 50)
    assert few["median"] == many["median"] == 2.0
    assert few["interval_95"] == [1.0, 3.0]
    assert many["interval_95"][1] - many["interval_95"][0] < 2.0
    assert pairs.interval([]) == {"median": None, "interval_95": None}


def test_peers_have_a_requirement_an_adapter_and_a_reader(tmp_path: Path) -> None:
    text = "# why\n\ntrackio==1.2  # pinned\nwandb==3\n"
    assert peers.parse_requirements(text) == {"trackio": "trackio==1.2", "wandb": "wandb==3"}
    assert set(peers.requirements()) | {adapters.OURS} == set(adapters.STORED)
    assert set(adapters.STORED) | {adapters.NOTHING, adapters.FLOOR} == set(adapters.START)
    found = peers.without("no network")
    assert (found.versions, set(found.missing.values())) == ({}, {"no network"})
    assert peers.last_line("Traceback:\n  File x\nOSError: full\n\n") == "OSError: full"
    assert peers.last_line("") == "no message"
    environment = peers.environment(tmp_path)  # recorders do not write into the user's home
    assert (environment["HOME"], environment["WANDB_MODE"]) == (str(tmp_path), "offline")


def test_only_steps_with_all_four_metrics_count() -> None:
    assert adapters.complete([[0, 1, 2], [0, 1, 2], [0, 1], [1, 0, 2]]) == 2
    assert adapters.complete([[0, 1], [0, 1], [0, 1]]) == 0


def fragment(kind: int, data: bytes) -> bytes:
    return struct.pack("<IHB", 0, len(data), kind) + data


def test_wandbs_records_are_found_across_blocks_up_to_the_torn_end() -> None:
    full, first, last = 1, 2, 4
    block = 64
    head = b"\0" * 7 + fragment(full, b"one")  # 17 bytes of 64
    head += fragment(first, b"a" * 35)  # 59: the rest of the block is too short for a fragment
    data = head.ljust(block, b"\0") + fragment(last, b"b" * 5) + fragment(full, b"three")
    torn = data + fragment(full, b"never written")[:-4]
    assert list(adapters.records(torn, block=block)) == [b"one", b"a" * 35 + b"b" * 5, b"three"]


def test_made_up_values_are_those_of_a_training_and_each_call_is_timed() -> None:
    rows = recording_child.made_up(1000)
    assert len(set(rows)) == 1000
    losses = [row[0] for row in rows]
    assert sum(losses[:100]) > 2 * sum(losses[-100:])
    assert all(struct.unpack("f", struct.pack("f", loss))[0] == loss for loss in losses)
    calls: list[tuple[Any, ...]] = []
    spent = recording_child.time_calls(lambda *row: calls.append(row), rows[:5])
    assert len(spent) == 5
    assert min(spent) > 0
    assert calls == [(step, *row) for step, row in enumerate(rows[:5])]


def speed(**changed: Any) -> dict[str, Any]:
    values = {"steps": 1000, "median_us": 1.0, "p99_us": 2.0, "max_us": 9.0, "cpu_s": 0.004}
    values |= {"finish_s": 0.1, "bytes": 50_000, "empty_bytes": 10_000, "live_bytes": 1}
    return values | {"stored": 1000} | changed


def test_fewer_steps_are_scaled_and_their_empty_store_left_out() -> None:
    rounds = [speed(median_us=us) for us in (1.0, 5.0, 2.0)]
    found = recorder.summary(rounds, [{"lost": 0, "lost_s": 0.0, "logged": 9}], empty=True)
    assert found["median_us"] == 2.0
    assert found["cpu_s_per_100k"] == pytest.approx(0.4)
    assert found["bytes_per_point"] == 10.0
    assert recorder.summary(rounds, [], empty=False)["bytes_per_point"] == 12.5


def test_one_lost_row_of_one_kill_misses_the_target() -> None:
    kills = [{"lost": 0, "lost_s": 0.0, "logged": 9}, {"lost": 1, "lost_s": 0.1, "logged": 9}]
    ours = recorder.summary([speed()], kills, empty=False)
    met = {name: target["met"] for name, target in recorder.targets(ours).items()}
    assert met.pop("lost_on_kill") is False
    assert all(met.values())


def test_unmeasured_values_meet_no_target_and_slow_recorders_take_fewer_steps() -> None:
    for targets in (recorder.targets({}), overhead.targets({})):
        assert not any(target["met"] for target in targets.values())
    plan = recorder.Plan(share=0.5)
    assert (plan.steps(adapters.OURS), plan.steps("mlflow")) == (50_000, 250)
    assert plan.kills_of(adapters.NOTHING) == 0
    found = overhead.compared([{"x": [1.0, 1.1]}, {"x": [1.2]}])["x"]  # one sample
    assert (found["median"], found["pairs"]) == (1.1, 3)
    assert found["by_set"] == [pytest.approx(1.05), 1.2]


def reads(ms: float) -> dict[str, Any]:
    return {what: {"ms": ms, "peak_mb": 1.0} for what in (*reader.READS, "incremental")}


def test_growth_is_longest_over_shortest() -> None:
    ours = {"100000": reads(0.5), "1000000": reads(0.9), "10000000": reads(0.8)}
    assert reader.growth(ours)["page"] == pytest.approx(1.6)
    targets = reader.targets(ours)
    assert targets["page_ms"] == {"value": 0.9, "at_most": 10.0, "met": True}
    assert targets["page_growth"]["met"] is False
    assert targets["peak_mb"]["met"] is True


def test_a_longer_run_of_a_slow_peer_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"write_s": 30.0, "chart": {"ms": 2000.0}}
    monkeypatch.setattr(reader, "measure_run", lambda *_: slow)
    found = reader.measure_peer(peers.without(""), "tensorboard", reader.Plan())
    assert found["100000"] == slow
    assert found["1000000"] == {"skipped": "would take 440 s to write and read"}


def test_a_report_rounds_all_the_way_down() -> None:
    assert report.rounded({"a": [1.23456, {"b": 98765.4}], "c": "text"}) == {
        "a": [1.235, {"b": 98770.0}],
        "c": "text",
    }
    assert report.quantile([], 0.5) is None
    assert report.quantile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0


def test_the_planted_delay_makes_each_step_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def now() -> float:
        clock[0] += 1e-6  # what a look at the clock takes
        return clock[0]

    monkeypatch.setattr(lab_truth_workload.time, "perf_counter", now)
    inner = TensorSplit.of(torch.zeros(4, 1), torch.zeros(4))
    ends = []
    split = lab_truth_workload.SlowedSplit(inner, 1.05)
    wait_s = lab_truth_workload.DEVICE_S
    for step_s in (0.002, 0.004, 0.001):
        split.take(torch.arange(2))
        ends.append(clock[0])
        clock[0] += step_s
    split.take(torch.arange(2))
    taken = [b - a for a, b in pairwise([*ends, clock[0]])]
    longer = [1.05 * (step_s + wait_s) for step_s in (0.002, 0.004, 0.001)]
    assert taken == pytest.approx(longer, abs=4e-6)


def test_the_planted_drift_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab_truth_workload.drift() == 1
    monkeypatch.setenv(lab_truth_workload.DRIFT_FOLDER, str(tmp_path))
    assert lab_truth_workload.drift() == 1
    (tmp_path / "samples.jsonl").write_text("{}\n" * 36)
    assert lab_truth_workload.drift() == pytest.approx(1.06)


def test_a_sweep_counts_as_right_if_the_delay_lies_in_its_interval() -> None:
    def arm(verdict: str, low: float, high: float) -> dict[str, Any]:
        return {"verdict": verdict, "low": low, "high": high, "text": verdict}

    def sweep(delayed: dict[str, Any], no_op: dict[str, Any]) -> dict[str, Any]:
        progress = {"done": 30}
        return {"status": "finished", "arms": [delayed, no_op], "drift": None, "progress": progress}

    right = lab_truth.judged(sweep(arm("slower", -0.06, -0.04), arm("undecided", -0.02, 0.05)))
    assert (right["delay_found"], right["no_op_different"]) == (True, False)
    wrong = lab_truth.judged(sweep(arm("slower", -0.04, -0.03), arm("faster", 0.02, 0.05)))
    assert (wrong["delay_found"], wrong["no_op_different"]) == (False, True)
    unsure = lab_truth.judged(sweep(arm("undecided", -0.06, 0.01), arm("no_difference", 0, 0)))
    assert (unsure["delay_found"], unsure["no_op_different"]) == (False, False)
