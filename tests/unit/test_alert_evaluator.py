"""The default rules on recorded numbers: each branch, and what says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from stepscope.alerts.evaluator import (
    PATIENCE,
    RETRIED_S,
    AlarmChange,
    AlertEvaluator,
    AlertFacts,
    StallDetector,
    title,
)
from stepscope.alerts.rules import (
    DEFAULTS,
    GPU_IDLE,
    GPU_LOST,
    LOSS,
    MEMORY_FULL,
    NO_STEP,
    THROTTLING,
    AlertRule,
    AlertState,
)

GPU, OTHER = "GPU-a", "GPU-b"
GIB = 2.0**30
RULES = {rule.name: rule for rule in DEFAULTS}


def facts(now: float, **known: Any) -> AlertFacts:
    """What is known at one look at a run that trains on GPU."""
    values = {place: (value,) for place, value in known.pop("values", {}).items()}
    base: dict[str, Any] = {
        "step": int(now),
        "step_due": True,
        "trains_on": frozenset({GPU}),
        "own": GPU,
        "labels": {GPU: "NVIDIA A100", OTHER: "NVIDIA T4"},
    }
    return AlertFacts(now=now, values=values, odd_steps=dict.fromkeys(values, 7), **(base | known))


def told(
    looks: Iterable[AlertFacts], evaluator: AlertEvaluator | None = None
) -> list[tuple[float, AlarmChange]]:
    evaluator = evaluator or AlertEvaluator(DEFAULTS)
    return [(look.now, change) for look in looks for change in evaluator.evaluate(look)]


def states(changes: list[tuple[float, AlarmChange]]) -> list[tuple[float, str, str]]:
    return [(now, change.rule.name, str(change.state)) for now, change in changes]


# --- memory ---


def memory(used: float, retries: float | None) -> dict[tuple[str, str], float]:
    values = {(GPU, "gpu/mem_used"): used * GIB, (GPU, "gpu/mem_total"): 80 * GIB}
    return values if retries is None else values | {("", "memory/alloc_retries"): retries}


def test_full_memory_with_retries_is_told_once_and_is_over_when_both_are() -> None:
    course = [(76.5, 0), (78, 0), (78, 1), (78, 2), (77, 3), (75, 3), (71, 3), (71, 3)]
    looks = [facts(now, values=memory(*values)) for now, values in enumerate(course)]
    looks += [facts(now, values=memory(71, 3)) for now in (20, 38, 39)]
    found = told(looks)
    assert states(found) == [(2, MEMORY_FULL, "raised"), (38, MEMORY_FULL, "cleared")]
    assert found[0][1].text.startswith("NVIDIA A100 is about to run out of memory: 98% is in use")
    assert found[0][1].value == pytest.approx(97.5)
    assert found[0][1].source == GPU
    assert found[1][1].text == "Memory full (NVIDIA A100): cleared after 36 s"


def test_full_memory_without_retries_is_what_a_cache_is_for() -> None:
    assert told([facts(now, values=memory(79.9, 0)) for now in range(100)]) == []
    assert told([facts(now, values=memory(79.9, None)) for now in range(9)]) == []


def test_retries_count_for_a_minute_and_those_before_do_not() -> None:
    course = {0: 5, 1: 5, 2: 6, 1 + RETRIED_S: 6, 2 + RETRIED_S: 6, 32 + RETRIED_S: 0}
    looks = [facts(now, values=memory(79, count)) for now, count in course.items()]
    assert states(told(looks)) == [
        (2, MEMORY_FULL, "raised"),
        (32 + RETRIED_S, MEMORY_FULL, "cleared"),
    ]


@pytest.mark.parametrize(
    ("share", "raised"), [(96.0, True), (95.0, False), (90.0, False), (math.nan, False)]
)
def test_memory_is_full_above_the_threshold(share: float, raised: bool) -> None:
    looks = [facts(now, values=memory(0.8 * share, now)) for now in range(3)]
    assert bool(told(looks)) is raised


def test_a_rank_that_asks_no_driver_evaluators_its_own_cache() -> None:
    values = {("", "memory/reserved"): 79 * GIB, ("", "memory/alloc_retries"): 0.0}
    looks = [
        facts(now, values=values | {("", "memory/alloc_retries"): float(now)}, own_total=80 * GIB)
        for now in range(3)
    ]
    assert [change.rule.name for _, change in told(looks)] == [MEMORY_FULL]


# --- throttling, lost GPUs ---


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x20, "software thermal slowdown"),
        (0x68, "software thermal slowdown, hardware thermal slowdown"),
        (0x04, None),  # the power cap at full load is normal
        (0x80, None),
        (0x01, None),
        (math.nan, None),
        (-1.0, None),
    ],
)
def test_only_heat_is_throttling(mask: float, words: str | None) -> None:
    looks = [facts(now, values={(GPU, "gpu/throttle_reasons"): mask}) for now in range(9)]
    found = [change.text for _, change in told(looks)]
    assert found == ([] if words is None else [f"NVIDIA A100: clocks lowered by {words} for 5 s"])


def test_heat_is_told_of_the_gpu_that_trains_alone() -> None:
    values = {(GPU, "gpu/throttle_reasons"): 64.0, (OTHER, "gpu/throttle_reasons"): 64.0}
    found = told([facts(now, values=values) for now in range(20)])
    assert states(found) == [(5, THROTTLING, "raised")]
    text = "NVIDIA A100: clocks lowered by hardware thermal slowdown for 5 s"
    assert found[0][1].text == text


def test_heat_that_flickers_is_throttling() -> None:
    masks = [32.0] * 8 + [0.0] * 2  # the newest sample of each look is without the bit
    values = {(GPU, "gpu/throttle_reasons"): masks}
    looks = [AlertFacts(now=now, values=values, trains_on=frozenset({GPU})) for now in range(10)]
    found = told(looks)
    assert states(found) == [(5, THROTTLING, "raised")]
    assert "software thermal slowdown" in found[0][1].text


def test_a_lost_gpu_is_told_and_so_is_its_return() -> None:
    gone = {OTHER: "GPU is lost"}
    looks = [facts(0), facts(1, lost=gone), facts(2, lost=gone), facts(3), facts(32), facts(33)]
    found = told(looks)
    assert states(found) == [(1, GPU_LOST, "raised"), (33, GPU_LOST, "cleared")]
    assert found[0][1].text == "NVIDIA T4: GPU is lost"
    assert found[1][1].text == "GPU lost (NVIDIA T4): cleared after 32 s"


# --- losses ---


def test_a_loss_that_is_no_number_is_told_with_its_step_and_each_loss_for_itself() -> None:
    losses = {
        ("", "train/loss"): math.nan,
        ("", "val/loss"): 0.5,
        ("", "train/loss.optimizer1"): 2.0,
    }
    looks = [facts(0, values=losses | {("", "train/loss"): 1.0})]
    looks += [facts(now, values=losses) for now in (1, 2)]
    looks += [facts(now, values=losses | {("", "train/loss"): 1.0}) for now in (3, 12, 13)]
    found = told(looks)
    assert states(found) == [(1, LOSS, "raised"), (13, LOSS, "cleared")]
    assert found[0][1].text == "train/loss is NaN at step 7"
    assert found[1][1].text == "Loss not finite (train/loss): cleared after 12 s"
    assert RULES[LOSS].level == "critical"


# --- steps ---


def clocked(course: Iterable[tuple[float, int, bool, int]]) -> list[float | None]:
    clock = StallDetector()
    return [clock.update(now, step, due=due, sign=sign) for now, step, due, sign in course]


def test_the_wait_for_a_step_counts_from_the_last_one_and_only_once_warm() -> None:
    course = [(0, 0, True, 0), (100, 1, True, 0), (160, 2, True, 0), (161, 3, True, 0)]
    course += [(162, 3, True, 0), (200, 3, True, 0), (201, 4, True, 0)]
    assert clocked(course) == [None, None, None, 0, 1, 39, 0]


def test_a_pause_and_work_that_is_no_step_begin_the_wait_anew() -> None:
    warm = [(float(step), step, True, 0) for step in range(4)]
    paused = [(60, 3, False, 0), (61, 3, True, 0), (90, 3, True, 0)]
    assert clocked([*warm, *paused])[-3:] == [None, 1, 30]
    validated = [(60, 3, True, 1), (80, 3, True, 1), (81, 3, True, 2)]
    assert clocked([*warm, *validated])[-3:] == [0, 20, 0]


def stalled(
    from_s: int, to_s: int, every_s: int = 1, step: int = 9, **known: Any
) -> list[AlertFacts]:
    return [facts(now, step=step, **known) for now in range(from_s, to_s)]


def steps(count: int, every_s: int = 1) -> list[AlertFacts]:
    return [facts(every_s * step, step=step) for step in range(count)]


def test_a_minute_without_a_step_is_told_once_and_is_over_at_the_next_step() -> None:
    looks = [*steps(10), *stalled(10, 200), facts(200, step=10), facts(201, step=11)]
    found = told(looks)
    assert states(found) == [(69, NO_STEP, "raised"), (200, NO_STEP, "cleared")]
    assert found[0][1].text == "No step for 1 min 00 s: the last was step 9"
    assert found[0][1].value == 60


@pytest.mark.parametrize(
    "quiet",
    [
        stalled(10, 500, step_due=False),  # paused, profiled, ended
        [facts(now, step=9, sign=now // 30) for now in range(10, 500)],  # validates
    ],
)
def test_a_run_that_owes_no_step_is_left_alone(quiet: list[AlertFacts]) -> None:
    assert told([*steps(10), *quiet]) == []


def test_the_first_steps_may_take_as_long_as_they_like() -> None:
    compiles = [*stalled(0, 300, step=0), *stalled(300, 600, step=1), *stalled(600, 900, step=2)]
    assert told(compiles) == []


def test_long_steps_raise_the_limit_for_the_next_ones() -> None:
    slow = steps(10, every_s=100)
    limit = PATIENCE * 100
    found = told([*slow, *stalled(900, 2000)])
    raised = [now for now, change in found if change.rule.name == NO_STEP]
    # The first step that was seen as a long one was told of; after it the limit is known.
    assert raised[-1] == 900 + limit


# --- idle ---


def idle(util: float, from_s: int, to_s: int, **known: Any) -> list[AlertFacts]:
    values = {(GPU, "gpu/util"): util, (OTHER, "gpu/util"): 0.0}
    return [facts(now, values=values, **known) for now in range(from_s, to_s)]


def test_an_idle_gpu_is_told_after_a_minute_of_training_on_it() -> None:
    found = told([*steps(5), *idle(0, 5, 100), *idle(80, 100, 120)])
    assert states(found) == [(65, GPU_IDLE, "raised"), (110, GPU_IDLE, "cleared")]
    assert found[0][1].text == (
        "NVIDIA A100 is idle: utilization below 5% for 1 min 00 s, while the run trains on it"
    )


@pytest.mark.parametrize(
    "looks",
    [
        [*steps(5), *idle(6, 5, 200)],
        [*steps(5), *idle(0, 5, 200, step_due=False)],
        [*steps(5), *idle(0, 5, 200, trains_on=frozenset(), own=None)],
        idle(0, 0, 200, step=0),
        [*steps(5), *idle(0, 5, 60), *idle(50, 60, 61), *idle(0, 61, 110)],
    ],
    ids=["busy", "paused", "on the CPU", "before the first steps", "not for long enough"],
)
def test_a_gpu_may_be_idle(looks: list[AlertFacts]) -> None:
    assert [c for _, c in told(looks) if c.rule.name == GPU_IDLE] == []


# --- rules of one's own ---


def test_a_rule_over_a_metric_of_gpus_has_an_alarm_for_each() -> None:
    rule = AlertRule(
        name="hot", metric="gpu/temp", above=85, clear=80, text="{device} has {value} > {threshold}"
    )
    values = {(GPU, "gpu/temp"): 90.0, (OTHER, "gpu/temp"): 70.0}
    evaluator = AlertEvaluator([rule])
    found = told([facts(0, values=values), facts(1, values=values)], evaluator)
    assert [change.text for _, change in found] == ["NVIDIA A100 has 90 °C > 85 °C"]
    both = told([facts(2, values=values | {(OTHER, "gpu/temp"): 86.0})], evaluator)
    assert [change.source for _, change in both] == [OTHER]


def test_what_is_in_braces_and_unknown_stays_as_it_is() -> None:
    text = "{value.__class__} {0} {metric} {value}"
    rule = AlertRule(name="big", metric="my/size", above=1, text=text)
    found = told([facts(0, values={("", "my/size"): 2e9})], AlertEvaluator([rule]))
    assert found[0][1].text == "{value.__class__} {0} my/size 2e+09"


def test_a_rule_that_is_off_and_the_ends_of_runs_are_not_looked_at() -> None:
    rule = AlertRule(name="x", metric="a", below=5, enabled=False, text="x")
    assert told([facts(0, values={("", "a"): 1.0})], AlertEvaluator([rule, *DEFAULTS])) == []


def test_bytes_are_shown_in_binary_units_and_names_as_words() -> None:
    rule = AlertRule(name="rss", metric="process/rss", above=GIB, text="{value} > {threshold}")
    found = told([facts(0, values={("", "process/rss"): 2 * GIB})], AlertEvaluator([rule]))
    assert found[0][1].text == "2.00 GiB > 1.00 GiB"
    assert found[0][1].state is AlertState.RAISED
    assert title("own-rule_gpu") == "Own rule GPU"
