"""The default rules on recorded numbers: each branch, and the values that raise no alert."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from stepscope.alerts.evaluator import (
    RETRIED_S,
    AlertChange,
    AlertEvaluator,
    AlertFacts,
    title,
)
from stepscope.alerts.settings import DEFAULTS, NO_STEP, AlertRule, AlertState
from stepscope.common.stall_detector import StepGap

GPU, OTHER = "GPU-a", "GPU-b"
GIB = 2.0**30
BUSY = StepGap(0.0, 0.1, 0.0)


def facts(now: float, **known: Any) -> AlertFacts:
    """Return the facts of one evaluation of a run that trains on GPU."""
    values = {place: (value,) for place, value in known.pop("values", {}).items()}
    base: dict[str, Any] = {
        "step": int(now),
        "gap": BUSY,
        "trains_on": frozenset({GPU}),
        "own": GPU,
        "labels": {GPU: "NVIDIA A100", OTHER: "NVIDIA T4"},
    }
    return AlertFacts(now=now, values=values, **(base | known))


def changes(*looks: AlertFacts, rules: Iterable[AlertRule] = DEFAULTS) -> list[AlertChange]:
    evaluator = AlertEvaluator(tuple(rules))
    return [change for look in looks for change in evaluator.evaluate(look)]


def states(looks: Iterable[AlertFacts]) -> list[tuple[float, str, str]]:
    evaluator = AlertEvaluator(DEFAULTS)
    return [
        (look.now, change.rule.name, str(change.state))
        for look in looks
        for change in evaluator.evaluate(look)
    ]


def memory(used: float, retries: float | None) -> dict[tuple[str, str], float]:
    values = {(GPU, "gpu/mem_used"): used * GIB, (GPU, "gpu/mem_total"): 80 * GIB}
    return values if retries is None else values | {("", "memory/alloc_retries"): retries}


def test_full_memory_with_retries_is_raised_once_and_cleared_when_both_are_over() -> None:
    course = [(76.5, 0), (78, 0), (78, 1), (78, 2), (77, 3), (75, 3), (71, 3), (71, 3)]
    looks = [facts(now, values=memory(*values)) for now, values in enumerate(course)]
    looks += [facts(now, values=memory(71, 3)) for now in (20, 38, 39)]
    assert states(looks) == [(2, "memory_full", "raised"), (38, "memory_full", "cleared")]
    raised, cleared = changes(*looks)
    assert raised.text.startswith("NVIDIA A100 is about to run out of memory: 98% is in use")
    assert (raised.value, raised.source) == (pytest.approx(97.5), GPU)
    assert cleared.text == "Memory full (NVIDIA A100): cleared after 36 s"


@pytest.mark.parametrize(
    ("looks", "raised"),
    [
        ([facts(now, values=memory(79.9, 0)) for now in range(100)], False),
        ([facts(now, values=memory(79.9, None)) for now in range(9)], False),
        *(
            ([facts(now, values=memory(0.8 * percent, now)) for now in range(3)], raised)
            for percent, raised in ((96.0, True), (95.0, False), (math.nan, False))
        ),
    ],
)
def test_memory_is_full_above_the_threshold(looks: list[AlertFacts], raised: bool) -> None:
    assert [change.rule.name for change in changes(*looks)] == ["memory_full"] * raised


def test_a_retry_counts_for_a_minute() -> None:
    course = {0: 5, 1: 5, 2: 6, 1 + RETRIED_S: 6, 2 + RETRIED_S: 6, 32 + RETRIED_S: 0}
    looks = [facts(now, values=memory(79, count)) for now, count in course.items()]
    assert states(looks) == [
        (2, "memory_full", "raised"),
        (32 + RETRIED_S, "memory_full", "cleared"),
    ]


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
def test_only_heat_of_a_training_gpu_is_throttling(mask: float, words: str | None) -> None:
    values = {(GPU, "gpu/throttle_reasons"): mask, (OTHER, "gpu/throttle_reasons"): 64.0}
    texts = [change.text for change in changes(*(facts(now, values=values) for now in range(9)))]
    assert texts == ([] if words is None else [f"NVIDIA A100: clocks lowered by {words} for 5 s"])


def test_heat_that_flickers_is_throttling() -> None:
    masks = [32.0] * 8 + [0.0] * 2  # the newest sample of each evaluation is without the bit
    values = {(GPU, "gpu/throttle_reasons"): masks}
    looks = [AlertFacts(now=now, values=values, trains_on=frozenset({GPU})) for now in range(10)]
    assert states(looks) == [(5, "throttling", "raised")]


def test_a_lost_gpu_is_raised_and_cleared_at_its_return() -> None:
    gone = {OTHER: "GPU is lost"}
    looks = [facts(0), facts(1, lost=gone), facts(2, lost=gone), facts(3), facts(32), facts(33)]
    assert states(looks) == [(1, "gpu_lost", "raised"), (33, "gpu_lost", "cleared")]
    texts = [change.text for change in changes(*looks)]
    assert texts == ["NVIDIA T4: GPU is lost", "GPU lost (NVIDIA T4): cleared after 32 s"]


def test_each_loss_has_its_own_alert_with_its_step() -> None:
    whole = {("", key): 0.5 for key in ("train/loss", "val/loss", "train/loss.optimizer1")}
    broken = whole | {("", "train/loss"): math.nan}
    course = [whole, broken, broken, whole, whole, whole]
    looks = [
        facts(now, values=values) for now, values in zip((0, 1, 2, 3, 12, 13), course, strict=True)
    ]
    assert states(looks) == [(1, "loss_not_finite", "raised"), (13, "loss_not_finite", "cleared")]
    raised, cleared = changes(*looks)
    assert raised.text == "train/loss is NaN at step 1"
    assert cleared.text == "Loss not finite (train/loss): cleared after 12 s"


def gaps(*seconds: float | None, longest_s: float = 0.0) -> list[AlertFacts]:
    """Return the facts of a run at step 9, without a step for these times; None: none is due."""
    known = (None if one is None else StepGap(one, 0.1, longest_s) for one in seconds)
    return [facts(now, step=9, gap=gap) for now, gap in enumerate(known)]


def test_a_minute_without_a_step_is_raised_once_and_cleared_at_the_next_step() -> None:
    looks = gaps(58, 59, 60, 61, 500, 0, 1)
    assert states(looks) == [(2, NO_STEP, "raised"), (5, NO_STEP, "cleared")]
    raised = changes(*looks)[0]
    assert (raised.text, raised.value) == ("No step for 1 min 00 s: the last was step 9", 60)


def test_a_gap_that_is_usual_or_not_known_raises_nothing() -> None:
    assert states(gaps(None, None, 59)) == []
    assert states(gaps(100, 149, 150, longest_s=100)) == [(2, NO_STEP, "raised")]


def idle(util: float, from_s: int, to_s: int, **known: Any) -> list[AlertFacts]:
    values = {(GPU, "gpu/util"): util, (OTHER, "gpu/util"): 0.0}
    return [facts(now, values=values, **known) for now in range(from_s, to_s)]


def test_an_idle_gpu_is_raised_after_a_minute_of_training_on_it() -> None:
    looks = [*idle(0, 5, 100), *idle(80, 100, 120)]
    assert states(looks) == [(65, "gpu_idle", "raised"), (110, "gpu_idle", "cleared")]
    assert changes(*looks)[0].text == (
        "NVIDIA A100 is idle: utilization below 5% for 1 min 00 s, while the run trains on it"
    )


@pytest.mark.parametrize(
    "looks",
    [
        idle(6, 5, 200),
        idle(0, 5, 200, gap=None),
        idle(0, 5, 200, trains_on=frozenset(), own=None),
        [*idle(0, 5, 60), *idle(50, 60, 61), *idle(0, 61, 110)],
    ],
    ids=["busy", "no step is due", "on the CPU", "not for long enough"],
)
def test_a_gpu_may_be_idle(looks: list[AlertFacts]) -> None:
    assert "gpu_idle" not in {change.rule.name for change in changes(*looks)}


def test_a_rule_over_a_device_metric_has_an_alert_for_each_gpu() -> None:
    text = "{device} has {value} > {threshold}"
    rule = AlertRule(name="hot", metric="gpu/temp", above=85, clear=80, text=text)
    first = facts(0, values={(GPU, "gpu/temp"): 90.0, (OTHER, "gpu/temp"): 70.0})
    second = facts(1, values={(GPU, "gpu/temp"): 90.0, (OTHER, "gpu/temp"): 86.0})
    assert [
        (change.source, change.text) for change in changes(first, first, second, rules=[rule])
    ] == [(GPU, "NVIDIA A100 has 90 °C > 85 °C"), (OTHER, "NVIDIA T4 has 86 °C > 85 °C")]


@pytest.mark.parametrize(
    ("rule", "value", "text"),
    [
        (
            AlertRule(
                name="big", metric="my/size", above=1, text="{value.__class__} {0} {metric} {value}"
            ),
            2e9,
            "{value.__class__} {0} my/size 2e+09",
        ),
        (
            AlertRule(name="rss", metric="process/rss", above=GIB, text="{value} > {threshold}"),
            2 * GIB,
            "2.00 GiB > 1.00 GiB",
        ),
        (AlertRule(name="off", metric="a", above=5, enabled=False, text="x"), 9.0, None),
    ],
)
def test_the_text_of_a_custom_rule(rule: AlertRule, value: float, text: str | None) -> None:
    found = changes(facts(0, values={("", rule.metric): value}), rules=[rule, *DEFAULTS])
    assert [change.text for change in found] == ([] if text is None else [text])
    assert all(change.state is AlertState.RAISED for change in found)
    assert title("own-rule_gpu") == "Own rule GPU"
