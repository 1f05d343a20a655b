"""Samples of a thread's Python stack: the line, its phase, and what the kernel counts of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from stepscope.diagnosis.code_time import line_that_grew
from stepscope.session import code_sampler
from stepscope.session.code_sampler import (
    FIRST_STEP,
    CodeSampler,
    TrainingThread,
)
from stepscope.session.training_facts import (
    MAX_PERIODS,
    CodeLine,
    Period,
    TrainingFacts,
)


class Waiting(nn.Module):
    """A model whose forward pass waits in a line of this file."""

    def __init__(self, entered: threading.Event, leave: threading.Event) -> None:
        super().__init__()
        self.entered = entered
        self.leave = leave

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        self.leave.wait()
        return batch


@contextmanager
def waiting(call: Callable[[threading.Event, threading.Event], object]) -> Iterator[TrainingThread]:
    """Run `call` in a thread until the end of the block."""
    entered, leave = threading.Event(), threading.Event()
    training = TrainingThread()

    def train() -> None:
        training.claim()
        call(entered, leave)

    thread = threading.Thread(target=train)
    thread.start()
    assert entered.wait(10)
    time.sleep(0.05)  # it is in `leave.wait` now
    try:
        yield training
    finally:
        leave.set()
        thread.join()


def sampled(training: TrainingThread, ticks: int = 5) -> tuple[list[Period], list[CodeLine]]:
    """Sample a thread within one step, and return the results after the next step."""
    step = FIRST_STEP
    clock = iter(range(1000))
    sampler = CodeSampler(training, lambda: step, lambda: float(next(clock)))
    for _ in range(ticks):
        sampler.tick()
    step += 1
    sampler.tick()
    return sampler.results()


def test_a_waiting_forward_pass_is_found_by_its_line() -> None:
    with waiting(lambda entered, leave: Waiting(entered, leave)(torch.ones(1))) as training:
        periods, lines = sampled(training)
    (line,) = lines
    assert (line.phase, line.source) == ("forward", "self.leave.wait()")
    assert line.call == "self.leave.wait()"
    assert line.below == "Event.wait"
    assert not line.in_torch
    assert line.counts == [5]
    assert periods[0].samples == 5
    assert line.asleep > 3  # of five samples; the first has no time before it


def test_the_phase_of_the_hooks_has_precedence() -> None:
    with waiting(lambda entered, leave: Waiting(entered, leave)(torch.ones(1))) as training:
        training.phase = "own code"
        _, lines = sampled(training)
    assert [line.phase for line in lines] == ["own code"]


@pytest.mark.parametrize(("late_s", "before"), [(0.0, False), (0.002, True), (0.01, False)])
def test_a_sample_that_waited_for_the_gil_means_the_code_before_its_call(
    late_s: float, before: bool
) -> None:
    step = FIRST_STEP
    with waiting(lambda entered, leave: (entered.set(), leave.wait())) as training:
        sampler = CodeSampler(training, lambda: step)
        sampler.tick()  # the thread's time without a core is counted from here
        sampler.tick(late_s)
        step += 1
        sampler.tick()
        _, lines = sampler.results()
    assert sum(sum(line.counts) for line in lines if line.before) == before


def test_a_sample_that_waited_for_a_core_means_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's own thread was ready to run for all of the 2 ms, without a core."""
    delays = itertools.count(0.0, 0.002)
    monkeypatch.setattr(code_sampler, "thread_times", lambda native_id: (0.0, next(delays)))
    step = FIRST_STEP
    with waiting(lambda entered, leave: (entered.set(), leave.wait())) as training:
        sampler = CodeSampler(training, lambda: step)
        for _ in range(3):
            sampler.tick(0.002)
        step += 1
        sampler.tick()
        _, lines = sampler.results()
    assert [line.before for line in lines] == [False]


def test_what_follows_the_last_step_does_not_count() -> None:
    step = FIRST_STEP
    with waiting(lambda entered, leave: (entered.set(), leave.wait())) as training:
        sampler = CodeSampler(training, lambda: step)
        for _ in range(3):
            sampler.tick()
        assert sampler.results() == ([], [])
        step += 1
        sampler.tick()
        sampler.tick()
        periods, _ = sampler.results()
    assert sum(period.samples for period in periods) == 3


def test_before_the_first_steps_nothing_is_sampled() -> None:
    with waiting(lambda entered, leave: (entered.set(), leave.wait())) as training:
        sampler = CodeSampler(training, lambda: FIRST_STEP - 1)
        sampler.tick()
        assert sampler.results() == ([], [])


def test_a_long_run_keeps_a_fixed_number_of_periods_and_all_its_samples() -> None:
    step = FIRST_STEP
    ticks = 20 * MAX_PERIODS
    with waiting(lambda entered, leave: (entered.set(), leave.wait())) as training:
        sampler = CodeSampler(training, lambda: step)
        for _ in range(ticks):
            sampler.tick()
            step += 1
        periods, (line,) = sampler.results()
    assert len(periods) <= MAX_PERIODS
    assert sum(period.samples for period in periods) == sum(line.counts) == ticks - 1
    assert [period.step for period in periods] == sorted({period.step for period in periods})


def line(number: int, counts: list[int]) -> CodeLine:
    return CodeLine(
        phase="", file="train.py", line=number, source="", call="", below="", in_torch=True,
        counts=counts,
    )  # fmt: skip


def test_the_line_that_grew_takes_more_time_per_step_at_the_end() -> None:
    periods = [Period(step=step, samples=10) for step in (100, 200, 260, 300, 330, 350)]
    facts = TrainingFacts(
        periods=periods, lines=[line(1, [9, 9, 8, 6, 5, 3]), line(2, [1, 1, 2, 4, 5, 7])]
    )
    grown = line_that_grew(facts)
    assert grown is not None
    assert grown.line == 2
