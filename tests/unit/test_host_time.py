"""Diagnoses by samples of the training thread, each beside a healthy run that looks similar."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from stepscope.diagnosis.classify import verdicts
from stepscope.diagnosis.results import BottleneckKind, StepAverages
from stepscope.diagnosis.step_window import Slowdown, is_of_script, slowdown_of
from stepscope.run_setup import RunSetup
from stepscope.session.training_facts import (
    CodeLine,
    Compilation,
    LoaderFacts,
    Period,
    TrainingFacts,
)

SCRIPT = RunSetup(on_gpu=False, own=False, cores=8)
GPU_SCRIPT = RunSetup(on_gpu=True, own=False, cores=8)
STEPS = StepAverages(steps=200, step_time=0.05, data_wait=0.001, computing=0.02)
LOADER = LoaderFacts(
    is_map=True,
    dataset="Images",
    in_memory=False,
    workers=0,
    persistent=False,
    batch_size=32,
    batch_bytes=2**20,
    batches=200,
    wait_s=20.0,
    passes=1,
)


def line(phase: str, call: str, share: float, asleep: float = 0.0, **more: Any) -> CodeLine:
    """One line with its share of 100 samples, and how much of it was asleep."""
    count = round(100 * share)
    values: dict[str, Any] = {"below": "", "in_torch": False} | more
    return CodeLine(
        phase=phase,
        file="train.py",
        line=7,
        source=call,
        call=call,
        counts=[count],
        asleep=asleep * count,
        **values,
    )


def facts(*lines: CodeLine, delay: float = 0.0, **more: Any) -> TrainingFacts:
    period = Period(step=200, samples=100, wall_s=10.0, delay_s=10 * delay)
    return TrainingFacts(periods=[period], lines=list(lines), **more)


TORCH = {"below": "Tensor.backward", "in_torch": True}
LOGGING = {"below": "SummaryWriter.add_histogram"}


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (facts(line("own code", "time.sleep(1)", 0.9, asleep=0.95)), ["blocked"]),
        (facts(line("own code", "time.sleep(1)", 0.2, asleep=0.95)), []),
        (facts(line("data", "time.sleep(1)", 0.9, asleep=0.95)), []),
        (facts(line("backward", "loss.backward()", 0.9, asleep=0.9, **TORCH)), []),
        (facts(line("own code", "log(name)", 0.7, **LOGGING)), ["host-bound"]),
        (facts(line("own code", "log(name)", 0.3, **LOGGING)), []),
        # Without a loader the phase is unknown: a package that is not torch is surely outside.
        (facts(line("", "env.step(a)", 0.7, below="Env.step")), ["host-bound"]),
        (facts(line("", "x @ w", 0.7)), []),
        (facts(line("forward", "net(x)", 0.7, below="Linear.forward", in_torch=True)), []),
        (facts(line("forward", "net(x)", 0.7, before=True, **TORCH)), ["host-bound"]),
        (facts(line("data", "for x in loader", 0.7, before=True)), []),
        (facts(delay=0.3), ["cpu-contention"]),
        (facts(delay=0.1), []),
    ],
)
def test_what_the_thread_does(given: TrainingFacts, kinds: list[str]) -> None:
    found = [one.kind for one in verdicts(STEPS, SCRIPT, given) if one.kind.names_a_cause]
    assert found == kinds


def test_waiting_for_a_core_is_no_computing_and_no_cost_of_a_batch() -> None:
    computing = StepAverages(steps=200, step_time=0.05, data_wait=0.001, computing=0.049)
    kinds = [one.kind for one in verdicts(computing, SCRIPT, facts())]
    assert kinds == ["compute-bound"]
    # Python code between the batch and the model counts in the time of the forward pass.
    of_python = facts(line("forward", "net(x)", 0.3, before=True, **TORCH))
    assert not any(one.kind.names_a_cause for one in verdicts(computing, SCRIPT, of_python))
    short = TrainingFacts(periods=[Period(step=200, samples=20, wall_s=2.0, delay_s=1.0)])
    assert not any(one.kind.names_a_cause for one in verdicts(computing, SCRIPT, short))
    # A batch takes 4 ms here, and would take 0.4 ms on a core of its own.
    loader = structs.replace(LOADER, wait_s=0.8, batch_bytes=0)
    for delay, pays in ((0.0, True), (0.9, False)):
        found = verdicts(WAITING, SCRIPT, facts(delay=delay, loaders=[loader]))
        (of_input,) = (one for one in found if one.kind is BottleneckKind.INPUT)
        assert of_input.next is not None
        assert ("num_workers=" in of_input.next.text) is pays


@pytest.mark.parametrize(
    ("growth", "delay", "is_own"), [(1.6, 0.0, True), (1.6, 0.1, False), (3, 0.1, True)]
)
def test_steps_that_other_programs_slow(growth: float, delay: float, is_own: bool) -> None:
    """The periods are of 100 steps each."""
    periods = []
    for number in range(9):
        own_s = growth if number >= 6 else 1.0
        wall_s = own_s / (1 - delay)
        step = 100 * (number + 1)
        periods.append(Period(step=step, samples=10, wall_s=wall_s, delay_s=wall_s - own_s))
    assert is_of_script(TrainingFacts(periods=periods)) is is_own


def test_the_sentence_names_the_line() -> None:
    (found,) = verdicts(STEPS, SCRIPT, facts(line("own code", "log(name)", 0.7, **LOGGING)))
    assert "train.py:7 log(name)" in found.text
    assert "70%" in found.text


def test_a_host_that_waits_for_the_gpu_is_named_only_where_the_gpu_idles() -> None:
    given = facts(line("own code", "loss.item()", 0.5))
    busy = StepAverages(steps=200, step_time=0.05, data_wait=0.0, copies=0.0, utilization=0.99)
    idle = StepAverages(steps=200, step_time=0.05, data_wait=0.0, copies=0.0, utilization=0.5)
    assert [one.kind for one in verdicts(busy, GPU_SCRIPT, given)] == ["compute-bound"]
    (found,) = verdicts(idle, GPU_SCRIPT, given)
    assert found.kind is BottleneckKind.SYNC
    assert "train.py:7 loss.item()" in found.text


WAITING = StepAverages(steps=200, step_time=0.1, data_wait=0.09, computing=0.01)


def advice(**changes: Any) -> tuple[str | None, str]:
    """Return the cause and the next step for a loader like LOADER with these changes."""
    values = {name: getattr(LOADER, name) for name in LOADER.__struct_fields__} | changes
    (found,) = verdicts(WAITING, SCRIPT, facts(loaders=[LoaderFacts(**values)]))
    assert found.kind is BottleneckKind.INPUT
    assert found.next is not None
    return found.cause, found.next.text


def test_workers_are_advised_only_where_they_pay() -> None:
    assert "num_workers=4" in advice()[1]
    cheap = {"wait_s": 0.1, "in_memory": True}
    assert "num_workers" not in advice(**cheap)[1]
    large = {"batch_bytes": 2**28}  # receiving it from a worker takes longer than making it
    assert "num_workers" not in advice(**large)[1]
    assert "num_workers=0" in advice(workers=2, in_memory=True)[1]
    assert "get_worker_info" in advice(is_map=False)[1]
    assert "__getitem__" in advice(workers=4)[1]


def test_workers_that_start_for_each_pass_are_the_cause() -> None:
    restarts: dict[str, Any] = {"workers": 2, "passes": 10, "wait_s": 1.0, "start_s": 9.0}
    assert advice(**restarts) == ("worker-restarts", advice(**restarts)[1])
    assert "persistent_workers=True" in advice(**restarts)[1]
    assert advice(**restarts, persistent=True)[0] is None
    assert "num_workers=0" in advice(**restarts, in_memory=True)[1]


def compilations(*steps: int) -> TrainingFacts:
    reason = "0/0: tensor 'x' size mismatch at index 0. expected 16, actual 19"
    listed = [Compilation(step=step, reason=reason) for step in steps]
    return facts(compilations=listed, compilation_count=len(listed))


def test_compilations_after_the_first_steps_are_named_with_torchs_reason() -> None:
    assert not verdicts(STEPS, SCRIPT, compilations(0, 2, 12, 30))[0].kind.names_a_cause
    (found,) = verdicts(STEPS, SCRIPT, compilations(0, 12, 30, 40))
    assert found.kind is BottleneckKind.RECOMPILING
    assert "12, 30, 40" in found.text
    assert "size mismatch" in found.text


def test_a_compiled_model_is_not_told_to_compile() -> None:
    busy = StepAverages(steps=200, step_time=0.05, data_wait=0.0, copies=0.0, utilization=0.99)
    before = verdicts(busy, GPU_SCRIPT)[0].next
    after = verdicts(busy, GPU_SCRIPT, compilations(0))[0].next
    assert before is not None
    assert after is not None
    assert "compile" in before.text
    assert "compile" not in after.text


def test_slower_steps_are_told_before_what_the_steps_consist_of() -> None:
    found = verdicts(WAITING, SCRIPT, facts(), Slowdown(start_s=0.01, end_s=0.1))
    assert [one.kind for one in found] == ["slowing-down", "input-bound"]


def test_a_trend_of_step_times_needs_a_rise_beyond_the_noise() -> None:
    draw = np.random.default_rng(0)
    steps = np.arange(960.0)
    noise = draw.lognormal(0, 0.2, len(steps))
    rising = slowdown_of(0.01 * (1 + 4 * steps / 960) * noise)
    assert rising is not None
    assert rising.end_s / rising.start_s == pytest.approx(4, rel=0.2)
    assert slowdown_of(0.01 * noise) is None
    spikes = np.where(draw.random(len(steps)) < 0.05, 1.0, 0.01 * noise)
    assert slowdown_of(spikes) is None
