"""From stored rows to events: the default rules, and which GPU and which rank reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.alerts import monitor
from stepscope.alerts.monitor import AlertMonitor
from stepscope.alerts.settings import DEFAULTS, AlertRule, AlertSettings, CommandChannel
from stepscope.common.stall_detector import StepGap
from stepscope.run import RunStatus
from stepscope.store import SeriesBlock
from stepscope.store.blocks import RECORDED_NAN, Event
from tests.support.run_folders import block_of_rows

GPU, OTHER = "GPU-a", "GPU-b"
GIB = 2.0**30
BUSY = StepGap(0.0, 0.1, 0.0)
DEVICES = [
    {"uuid": GPU, "name": "H100", "memory_total": 80 * GIB},
    {"uuid": OTHER, "name": "T4", "memory_total": 16 * GIB},
]


@dataclass
class Bench:
    """A monitor of a run at step 5; `check` evaluates its rules at the time `now`."""

    folder: Path
    rules: tuple[AlertRule, ...] = DEFAULTS
    rank: int = 0
    now: float = 0.0
    run_json: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = AlertSettings(rules=self.rules, path=Path("alerts.toml"))
        self.monitor = AlertMonitor(settings, self.folder, rank=self.rank, clock=lambda: self.now)
        base = {"status": "running", "kind": "init", "device": GPU, "devices": DEVICES}
        self.run_json = base | self.run_json

    def steps(self, **values: list[float]) -> None:
        keys = tuple(key.replace("_", "/", 1) for key in values)
        axis = np.arange(len(next(iter(values.values()))), dtype=float)
        block = SeriesBlock.raw(keys, axis, axis, np.array(list(values.values())))
        self.monitor.add({("steps", ""): block}, ())

    def sampled(self, source: str, **values: float) -> None:
        named = {key.replace("_", "/", 1): value for key, value in values.items()}
        stream = "devices" if source else "samples"
        self.monitor.add({(stream, source): block_of_rows([(0.0, 0, named)])}, ())

    def events(self, gap: StepGap | None = BUSY) -> list[tuple[str, str, dict[str, Any]]]:
        return self.monitor.check(self.run_json, 5, gap, None)

    def check(self, now: float | None = None, gap: StepGap | None = BUSY) -> list[str]:
        """Return the changes at a time, by default a second after the last."""
        self.now = self.now + 1 if now is None else now
        return [
            f"{self.now:g} {data['rule']} {data['state']} {data['uuid'] or ''}".strip()
            for *_, data in self.events(gap)
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_full_memory_with_retries_is_raised_once_and_cleared_when_it_is_over(bench: Bench) -> None:
    found = []
    course = ((1, 78, 0), (2, 78, 1), (3, 78, 2), (4, 75, 3), (33, 78, 3), (34, 78, 3))
    for now, used, retries in course:
        bench.sampled(GPU, gpu_mem_used=used * GIB)
        bench.sampled("", memory_alloc_retries=retries)
        found += bench.check(now)
    assert found == [f"2 memory_full raised {GPU}", f"34 memory_full cleared {GPU}"]


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([0x68], "software thermal slowdown, hardware thermal slowdown"),
        ([0x20, 0, 0], "software thermal slowdown"),  # it flickers
        ([0x04], None),  # the power cap at full load is normal
    ],
)
def test_only_heat_of_a_training_gpu_is_throttling(
    bench: Bench, masks: list[float], words: str | None
) -> None:
    texts = []
    for now in range(7):
        for mask in masks:
            bench.sampled(GPU, gpu_throttle_reasons=mask)
        bench.sampled(OTHER, gpu_throttle_reasons=64.0)
        bench.now = now
        texts += [text for _, text, _ in bench.events()]
    expected = f"H100 ({GPU}): clocks lowered by {words} for 5 s"
    assert texts == ([] if words is None else [expected])


def test_lost_and_recovered_gpus_are_events_of_the_sampler(bench: Bench) -> None:
    lost = Event(0.0, 0, 0, "gpu_lost", "GPU 1 (H100): GPU is lost", {"uuid": OTHER})
    bench.monitor.add({}, [lost])
    assert bench.check(1) + bench.check(2) == [f"1 gpu_lost raised {OTHER}"]
    bench.monitor.add({}, [Event(0.0, 0, 0, "gpu_recovered", "", {"uuid": OTHER})])
    found = [change for now in (3, 32, 33, 34) for change in bench.check(now)]
    assert found == [f"33 gpu_lost cleared {OTHER}"]


def test_each_loss_has_its_own_alert_and_a_missing_value_is_none(bench: Bench) -> None:
    bench.steps(train_loss=[1.0, math.nan, 1.0])  # NaN without a mark: the row has no loss
    assert bench.check() == []
    bench.steps(train_loss=[1.0, RECORDED_NAN, 1.0])
    [(_, text, data)] = bench.events()
    assert (text, data["value"]) == ("train/loss is NaN at step 5", "NaN")
    bench.steps(val_loss=[math.inf])
    assert bench.check(2) == ["2 loss_not_finite raised"]
    for now in (3, 12, 13):  # between two steps nothing changes
        bench.steps(train_loss=[1.0])
        found = bench.check(now)
    assert found == ["13 loss_not_finite cleared"]


def test_a_minute_without_a_step_is_raised_once_and_cleared_at_the_next_step(
    bench: Bench,
) -> None:
    gaps = (None, 59, 60, 500, 0, 1)
    found = [
        change
        for seconds in gaps
        for change in bench.check(gap=None if seconds is None else StepGap(seconds, 0.1, 0.0))
    ]
    assert found == ["3 no_step raised", "5 no_step cleared"]
    assert bench.check(gap=StepGap(149, 0.1, 100)) == [], "the longest gap was 100 s"


def idle(bench: Bench, seconds: Iterable[int], util: float, gap: StepGap | None) -> list[str]:
    found = []
    for now in seconds:
        bench.sampled(GPU, gpu_util=util)
        bench.sampled(OTHER, gpu_util=0.0)
        found += bench.check(now, gap)
    return found


def test_an_idle_gpu_is_raised_after_a_minute_of_training_on_it(bench: Bench) -> None:
    found = idle(bench, range(5, 100), 0, BUSY) + idle(bench, range(100, 120), 80, BUSY)
    assert found == [f"65 gpu_idle raised {GPU}", f"110 gpu_idle cleared {GPU}"]


def test_a_gpu_may_be_idle(tmp_path: Path, bench: Bench) -> None:
    assert idle(bench, range(200), 6, BUSY) == [], "it is busy"
    assert idle(bench, range(200, 400), 0, None) == [], "no step is due"
    found = idle(bench, range(400, 450), 0, BUSY) + idle(bench, [450], 50, BUSY)
    assert found + idle(bench, range(451, 500), 0, BUSY) == [], "not for long enough"
    on_cpu = Bench(tmp_path, run_json={"device": "cpu"})
    assert idle(on_cpu, range(200), 0, BUSY) == []


def test_one_rank_reports_the_gpus_that_all_ranks_train_on(tmp_path: Path) -> None:
    files = {"run.json": GPU, "rank1.json": OTHER, "rank3.json": "cpu"}
    for name, device in files.items():
        run_json = {"kind": "init", "device": device, "status": "running", "heartbeat": 0.0}
        (tmp_path / name).write_text(json.dumps(run_json))
    (tmp_path / "rank2.json").write_text("half a fi")
    first = Bench(tmp_path, run_json={"world_size": 4})
    second = Bench(tmp_path, rank=1, run_json={"world_size": 4, "device": OTHER})
    found: list[list[str]] = [[], []]
    for _ in range(8):
        for uuid in (GPU, OTHER, "GPU-c"):
            first.sampled(uuid, gpu_throttle_reasons=64.0)
        for one, changes in zip((first, second), found, strict=True):
            changes += one.check()
    both = [f"6 throttling raised {GPU}", f"6 throttling raised {OTHER}"]
    assert [sorted(changes) for changes in found] == [both, []]


def test_seconds_without_a_value_do_not_restart_the_wait(tmp_path: Path) -> None:
    rule = AlertRule(name="hot", metric="gpu/temp", above=85, for_s=10, text="{device} is hot")
    bench = Bench(tmp_path, (rule,))
    found = []
    for second in range(25):
        if second % 10 == 0:
            bench.sampled(GPU, gpu_temp=90.0)
        found += bench.check(second)
    assert found == [f"10 hot raised {GPU}"]


@pytest.mark.parametrize(
    ("rule", "source", "value", "text"),
    [
        (
            AlertRule(name="big", metric="my/size", above=1, text="{value.__class__} {0} {metric}"),
            "",
            2e9,
            "{value.__class__} {0} my/size",
        ),
        (
            AlertRule(
                name="hot", metric="gpu/temp", above=85, text="{device}: {value} > {threshold}"
            ),
            OTHER,
            86.0,
            f"T4 ({OTHER}): 86 °C > 85 °C",
        ),
        (AlertRule(name="off", metric="a/b", above=5, enabled=False, text="x"), "", 9.0, None),
    ],
)
def test_the_text_of_a_custom_rule(
    tmp_path: Path, rule: AlertRule, source: str, value: float, text: str | None
) -> None:
    bench = Bench(tmp_path, (rule,))
    bench.sampled(source, **{rule.metric.replace("/", "_"): value})
    assert [event[1] for event in bench.events()] == ([] if text is None else [text])


def test_a_hang_of_a_job_is_delivered_once_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered: list[Any] = []

    class Sender:
        def deliver(self, alert: Any, settings: AlertSettings) -> None:
            delivered.append((alert.rule, alert.rank))

    monkeypatch.setattr(monitor, "open_sender", Sender)
    settings = AlertSettings(path=Path("a"), command=CommandChannel(argv=("x",)))
    for rank in range(3):
        watch = AlertMonitor(settings, tmp_path, rank=rank)
        [(_, text, data)] = watch.check(
            {"world_size": 3}, 5, StepGap(60.0, 0.1, 0.0), "Rank 1 did not enter all_reduce #7."
        )
        assert data["rule"] == "no_step"
        assert text.endswith("step 5. Rank 1 did not enter all_reduce #7.")
    assert delivered == [("no_step", 0)]


RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


@pytest.mark.parametrize(
    ("rank", "ranks", "status", "reason", "text"),
    [
        (1, 2, RunStatus.FAILED, "ValueError: no", "The run failed: ValueError: no"),
        (1, 2, RunStatus.FAILED, "Connection closed by peer", None),
        (0, 2, RunStatus.FINISHED, None, "Finished at 1,200"),
        (1, 2, RunStatus.FINISHED, None, None),
        # A run without other ranks has lost the connection to another service.
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
    event = bench.monitor.ended(bench.run_json, 1200, status, reason)
    assert (event and event[1]) == text
