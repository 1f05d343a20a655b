"""From stored rows to events: which GPU counts, what grows old, and which rank speaks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.alerts.monitor import STALE_S, AlertMonitor
from stepscope.alerts.notifier import AlertNotifier
from stepscope.alerts.rules import DEFAULTS, AlertRule
from stepscope.alerts.settings import AlertSettings
from stepscope.run import RunStatus
from stepscope.store import SeriesBlock
from stepscope.store.blocks import RECORDED_NAN, Event, Sample

NOTHING = SeriesBlock.raw((), np.empty(0), np.empty(0), np.empty((0, 0)))
HOT = AlertRule(name="hot", metric="gpu/temp", above=85, clear=80, for_s=10, text="{device} is hot")


@dataclass
class Bench:
    """A watch with a clock of its own, which a look moves on by a second."""

    folder: Path
    rules: tuple[AlertRule, ...] = DEFAULTS
    rank: int = 0
    now: float = 0.0
    run_json: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = AlertSettings(rules=self.rules, path=Path("alerts.toml"))
        self.watch = AlertMonitor(settings, self.folder, rank=self.rank, clock=lambda: self.now)
        self.run_json = {
            "status": "running",
            "kind": "init",
            "device": "GPU-a",
            "devices": [{"uuid": f"GPU-{name}", "name": "H100"} for name in "ab"],
        } | self.run_json

    def steps(self, **values: list[float]) -> None:
        keys = tuple(key.replace("_", "/", 1) for key in values)
        count = len(next(iter(values.values())))
        axis = np.arange(count, dtype=float)
        self.watch.saw(SeriesBlock.raw(keys, axis, axis, np.array(list(values.values()))), ())

    def sampled(self, source: str, **values: float) -> None:
        named = {key.replace("_", "/", 1): value for key, value in values.items()}
        stream = "devices" if source else "samples"
        self.watch.saw(NOTHING, [Sample(stream, source, 0.0, 0, named)])

    def look(self, step: int = 0) -> list[str]:
        self.now += 1
        told = self.watch.look(self.run_json, step)
        return [
            f"{data['rule']} {data['state']} {data.get('uuid', '')}".strip() for *_, data in told
        ]


def test_one_rank_speaks_of_the_gpus_that_all_ranks_train_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"kind": "init", "device": "GPU-a"}))
    (tmp_path / "rank1.json").write_text(json.dumps({"kind": "init", "device": "GPU-b"}))
    (tmp_path / "rank2.json").write_text("half a fi")
    (tmp_path / "rank3.json").write_text(json.dumps({"kind": "init", "device": "cpu"}))
    first = Bench(tmp_path, run_json={"world_size": 4})
    second = Bench(tmp_path, rank=1, run_json={"world_size": 4, "device": "GPU-b"})
    told: list[str] = []
    for _ in range(8):
        for uuid in ("GPU-a", "GPU-b", "GPU-c"):
            first.sampled(uuid, gpu_throttle_reasons=64.0)
        told += first.look()
        assert second.look() == []
    assert told == ["throttling raised GPU-a", "throttling raised GPU-b"]


def test_a_run_of_one_process_speaks_of_its_own_gpu(tmp_path: Path) -> None:
    bench = Bench(tmp_path, run_json={"device": None, "kind": "trainer"})
    bench.run_json["config"] = {"device": "GPU-b"}
    told: list[str] = []
    for _ in range(8):
        for uuid in ("GPU-a", "GPU-b"):
            bench.sampled(uuid, gpu_throttle_reasons=64.0)
        told += bench.look()
    assert told == ["throttling raised GPU-b"]


def test_a_sampled_value_grows_old_and_one_of_a_step_does_not(tmp_path: Path) -> None:
    slow = AlertRule(name="slow", metric="my/score", above=1, clear=1, for_s=STALE_S + 20, text="x")
    rules = (
        AlertRule(name="long", metric="gpu/temp", above=85, for_s=STALE_S + 20, text="x"),
        slow,
    )
    bench = Bench(tmp_path, rules)
    bench.sampled("GPU-a", gpu_temp=90.0)
    bench.steps(my_score=[2.0])
    told = [said for _ in range(int(STALE_S) + 60) for said in bench.look()]
    assert told == ["slow raised"]


def test_gaps_of_slow_tiers_do_not_begin_the_wait_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (HOT,))
    told = []
    for second in range(25):
        if second % 10 == 0:
            bench.sampled("GPU-a", gpu_temp=90.0)
        told += [(second, said) for said in bench.look()]
    assert told == [(10, "hot raised GPU-a")]


def test_a_nan_between_two_looks_is_seen_and_a_missing_value_is_not_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.steps(train_loss=[1.0, math.nan, 1.0])  # NaN without a mark: the row has no loss
    assert bench.look() == []
    bench.steps(train_loss=[1.0, RECORDED_NAN, 1.0])
    assert bench.look() == ["loss_not_finite raised"]
    bench.steps(val_loss=[math.inf])
    assert bench.look() == ["loss_not_finite raised"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["no_step raised"]),
        ({"status": "paused"}, []),
        ({"status": "pending"}, []),
        ({"total_steps": 5}, []),
        ({"total_steps": 6}, ["no_step raised"]),
        ({"total_steps": "many"}, ["no_step raised"]),
    ],
)
def test_a_step_is_due_while_the_run_trains(
    tmp_path: Path, change: dict[str, Any], expected: list[str]
) -> None:
    bench = Bench(tmp_path)
    assert [said for step in range(6) for said in bench.look(step)] == []
    bench.run_json |= change
    assert [said for _ in range(70) for said in bench.look(5)] == expected


def test_a_job_that_hangs_is_delivered_once_and_is_an_event_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered = []
    monkeypatch.setattr(AlertNotifier, "deliver", lambda self, alert: delivered.append(alert))
    for rank in range(3):
        bench = Bench(tmp_path, rank=rank, run_json={"world_size": 3})
        told = [said for look in range(70) for said in bench.look(min(look, 5))]
        assert told == ["no_step raised"]
    assert [(alert.rule, alert.rank) for alert in delivered] == [("no_step", 0)]


def test_what_holds_the_training_up_by_our_doing_owes_no_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert [said for step in range(6) for said in bench.look(step)] == []
    bench.watch.busy = lambda: True
    assert [said for _ in range(70) for said in bench.look(5)] == []


def test_lost_and_found_gpus_come_as_events_of_the_sampler(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lost = Event(0.0, 0, 0, "gpu_lost", "GPU 1 (H100): GPU is lost", {"uuid": "GPU-b"})
    bench.watch.saw(NOTHING, [lost])
    assert bench.look() == ["gpu_lost raised GPU-b"]
    assert bench.look() == []
    back = Event(0.0, 0, 0, "gpu_recovered", "GPU 1 (H100): answers again", {"uuid": "GPU-b"})
    bench.watch.saw(NOTHING, [back])
    assert [bench.look() for _ in range(30)] == [[]] * 30
    assert bench.look() == ["gpu_lost cleared GPU-b"]


@pytest.mark.parametrize(
    ("rank", "status", "reason", "rule"),
    [
        (0, RunStatus.FAILED, "ValueError: no", "run_failed"),
        (1, RunStatus.FAILED, "ValueError: no", "run_failed"),
        (1, RunStatus.FAILED, "Connection closed by peer", None),
        (0, RunStatus.FAILED, None, "run_failed"),
        (0, RunStatus.FINISHED, None, "run_finished"),
        (1, RunStatus.FINISHED, None, None),
        (0, RunStatus.STOPPED, "Stopped.", None),
    ],
)
def test_how_a_run_ends_is_told_by_who_it_concerns(
    tmp_path: Path, rank: int, status: RunStatus, reason: str | None, rule: str | None
) -> None:
    ending = AlertRule(name="run_finished", text="Finished at {step}")
    rules = (*(rule for rule in DEFAULTS if rule.name != "run_finished"), ending)
    bench = Bench(tmp_path, rules, rank, run_json={"world_size": 2})
    told = bench.watch.ended(bench.run_json, 1200, status, reason)
    assert (None if told is None else told[2]["rule"]) == rule
    if rule == "run_finished":
        assert told is not None
        assert told[1] == "Finished at 1,200"
    if told is not None and reason is not None:
        assert reason in told[1]


@pytest.mark.parametrize(
    "reason",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
@pytest.mark.parametrize("world", [{}, {"world_size": 1}])
def test_a_lost_connection_of_a_run_without_other_ranks_is_a_failure(
    tmp_path: Path, reason: str, world: dict[str, int]
) -> None:
    bench = Bench(tmp_path, run_json=world)
    told = bench.watch.ended(bench.run_json, 7, RunStatus.FAILED, reason)
    assert told is not None
    assert told[1] == f"The run failed: {reason}"


def test_braces_in_the_reason_of_a_failure_stay_as_they_are(tmp_path: Path) -> None:
    rule = AlertRule(name="run_failed", text="At {step}: {value}")
    bench = Bench(tmp_path, (rule,))
    told = bench.watch.ended(bench.run_json, 1200, RunStatus.FAILED, "shape {step} of {value}")
    assert told is not None
    assert told[1] == "At 1,200: shape {step} of {value}"


def test_alerts_that_are_off_see_and_say_nothing(tmp_path: Path) -> None:
    watch = AlertMonitor(AlertSettings(), tmp_path)
    block = SeriesBlock.raw(("train/loss",), np.zeros(1), np.zeros(1), np.array([[RECORDED_NAN]]))
    watch.saw(block, ())
    assert watch.look({"status": "running"}, 0) == []
    assert watch.ended({}, 0, RunStatus.FAILED, "no") is None
