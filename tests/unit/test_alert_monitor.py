"""From stored rows to events: which GPU counts, which values expire, and which rank reports."""

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
from stepscope.alerts.settings import DEFAULTS, AlertRule, AlertSettings
from stepscope.common.stall_detector import StepGap
from stepscope.run import RunStatus
from stepscope.store import SeriesBlock
from stepscope.store.blocks import RECORDED_NAN, Event, Sample

NOTHING = SeriesBlock.raw((), np.empty(0), np.empty(0), np.empty((0, 0)))
HOT = AlertRule(name="hot", metric="gpu/temp", above=85, clear=80, for_s=10, text="{device} is hot")


@dataclass
class Bench:
    """A monitor whose clock advances by a second with each look."""

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
        self.watch.add(SeriesBlock.raw(keys, axis, axis, np.array(list(values.values()))), ())

    def sampled(self, source: str, **values: float) -> None:
        named = {key.replace("_", "/", 1): value for key, value in values.items()}
        stream = "devices" if source else "samples"
        self.watch.add(NOTHING, [Sample(stream, source, 0.0, 0, named)])

    def look(self, gap: StepGap | None = None) -> list[str]:
        self.now += 1
        return [
            f"{data['rule']} {data['state']} {data.get('uuid', '')}".strip()
            for *_, data in self.watch.check(self.run_json, 5, gap, None)
        ]

    def looks(self, count: int) -> list[str]:
        return [change for _ in range(count) for change in self.look()]


def test_one_rank_reports_the_gpus_that_all_ranks_train_on(tmp_path: Path) -> None:
    for name, device in (("run.json", "GPU-a"), ("rank1.json", "GPU-b"), ("rank3.json", "cpu")):
        (tmp_path / name).write_text(json.dumps({"kind": "init", "device": device}))
    (tmp_path / "rank2.json").write_text("half a fi")
    first = Bench(tmp_path, run_json={"world_size": 4})
    second = Bench(tmp_path, rank=1, run_json={"world_size": 4, "device": "GPU-b"})
    alone = Bench(
        tmp_path, run_json={"device": None, "kind": "trainer", "config": {"device": "GPU-b"}}
    )
    found: list[list[str]] = [[], [], []]
    for _ in range(8):
        for uuid in ("GPU-a", "GPU-b", "GPU-c"):
            first.sampled(uuid, gpu_throttle_reasons=64.0)
            alone.sampled(uuid, gpu_throttle_reasons=64.0)
        for bench, changes in zip((first, second, alone), found, strict=True):
            changes += bench.look()
    both = ["throttling raised GPU-a", "throttling raised GPU-b"]
    assert found == [both, [], both[1:]]


def test_a_sampled_value_expires_and_a_value_of_a_step_does_not(tmp_path: Path) -> None:
    lasting = {"above": 1.0, "for_s": STALE_S + 20, "text": "x"}
    slow = AlertRule(name="slow", metric="my/score", **lasting)
    bench = Bench(tmp_path, (AlertRule(name="long", metric="gpu/temp", **lasting), slow))
    bench.sampled("GPU-a", gpu_temp=90.0)
    bench.steps(my_score=[2.0])
    assert bench.looks(int(STALE_S) + 60) == ["slow raised"]


def test_gaps_of_slow_tiers_do_not_restart_the_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (HOT,))
    found = []
    for second in range(25):
        if second % 10 == 0:
            bench.sampled("GPU-a", gpu_temp=90.0)
        found += [(second, change) for change in bench.look()]
    assert found == [(10, "hot raised GPU-a")]


def test_a_nan_between_two_looks_is_seen_and_a_missing_value_is_not_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.steps(train_loss=[1.0, math.nan, 1.0])  # NaN without a mark: the row has no loss
    assert bench.look() == []
    bench.steps(train_loss=[1.0, RECORDED_NAN, 1.0])
    assert bench.look() == ["loss_not_finite raised"]
    bench.steps(val_loss=[math.inf])
    assert bench.look() == ["loss_not_finite raised"]


def test_a_hang_of_a_job_is_delivered_once_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered = []
    monkeypatch.setattr(AlertNotifier, "deliver", lambda self, alert: delivered.append(alert))
    for rank in range(3):
        bench = Bench(tmp_path, rank=rank, run_json={"world_size": 3})
        [(_, text, data)] = bench.watch.check(
            bench.run_json, 5, StepGap(60.0, 0.1, 0.0), "Rank 1 did not enter all_reduce #7."
        )
        assert data["rule"] == "no_step"
        assert text.endswith("step 5. Rank 1 did not enter all_reduce #7.")
    assert [(alert.rule, alert.rank) for alert in delivered] == [("no_step", 0)]


def test_lost_and_recovered_gpus_are_events_of_the_sampler(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lost = Event(0.0, 0, 0, "gpu_lost", "GPU 1 (H100): GPU is lost", {"uuid": "GPU-b"})
    bench.watch.add(NOTHING, [lost])
    assert bench.looks(2) == ["gpu_lost raised GPU-b"]
    back = Event(0.0, 0, 0, "gpu_recovered", "GPU 1 (H100): answers again", {"uuid": "GPU-b"})
    bench.watch.add(NOTHING, [back])
    assert bench.looks(30) == []
    assert bench.look() == ["gpu_lost cleared GPU-b"]


BROKEN = "BrokenPipeError: [Errno 32] Broken pipe"
RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


@pytest.mark.parametrize(
    ("rank", "ranks", "status", "reason", "text"),
    [
        (0, 2, RunStatus.FAILED, "ValueError: no", "The run failed: ValueError: no"),
        (1, 2, RunStatus.FAILED, "ValueError: no", "The run failed: ValueError: no"),
        (1, 2, RunStatus.FAILED, "Connection closed by peer", None),
        (0, 2, RunStatus.FAILED, None, "The run failed: it gives no reason."),
        (0, 2, RunStatus.FINISHED, None, "Finished at 1,200"),
        (1, 2, RunStatus.FINISHED, None, None),
        (0, 2, RunStatus.STOPPED, "Stopped.", None),
        # A run without other ranks has lost the connection to another service.
        (0, 1, RunStatus.FAILED, BROKEN, f"The run failed: {BROKEN}"),
        (0, None, RunStatus.FAILED, RESET, f"The run failed: {RESET}"),
        (0, 1, RunStatus.FAILED, "{step} {value}", "The run failed: {step} {value}"),
    ],
)
def test_the_end_of_a_run_is_reported_by_the_rank_that_caused_it(
    tmp_path: Path,
    rank: int,
    ranks: int | None,
    status: RunStatus,
    reason: str | None,
    text: str | None,
) -> None:
    finished = AlertRule(name="run_finished", text="Finished at {step}")
    rules = (*(rule for rule in DEFAULTS if rule.name != "run_finished"), finished)
    bench = Bench(tmp_path, rules, rank, run_json={"world_size": ranks} if ranks else {})
    event = bench.watch.ended(bench.run_json, 1200, status, reason)
    assert (event and event[1]) == text


def test_disabled_alerts_have_no_events(tmp_path: Path) -> None:
    watch = AlertMonitor(AlertSettings(), tmp_path)
    block = SeriesBlock.raw(("train/loss",), np.zeros(1), np.zeros(1), np.array([[RECORDED_NAN]]))
    watch.add(block, ())
    assert watch.check({"status": "running"}, 0, StepGap(99.0, 0.1, 0.0), None) == []
    assert watch.ended({}, 0, RunStatus.FAILED, "no") is None
