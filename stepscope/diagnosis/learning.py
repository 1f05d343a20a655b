"""Whether a run learns: a loss that is not finite, and updates that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepscope.common.metrics import Stream
from stepscope.diagnosis.results import BottleneckDiagnosis, BottleneckKind
from stepscope.run_setup import Recommendation, RunSetup
from stepscope.session.training_facts import LearningFacts, NonFinite, TrainingFacts
from stepscope.store import StoreReader
from stepscope.store.blocks import LOSS, Floats
from stepscope.store.final_values import last_value, read_newest
from stepscope.store.reader import EVERY

NO_LEARNING, NOT_FINITE = BottleneckKind.NO_LEARNING, BottleneckKind.NOT_FINITE
MIN_CHECKS = 10  # of sampled steps that all show the same
MIN_EVAL_CHECKS = 5  # in a row: a model's modules are known some seconds after its first step
MIN_SKIPPED, MOST_SKIPPED = 10, 0.9  # steps, and their minimum fraction
ZERO_RATE_STEPS = 20  # newest steps with a learning rate of 0
MIN_ZERO_RATE = 0.2  # Minimum fraction of the run since then: many schedules end at 0.
MAX_BUCKETS = 4096  # of the steps of a whole run
LOSSES_BEFORE = 20  # steps before the first loss that is not finite
GROWTH = 10.0  # Minimum ratio of the last finite loss to the lowest one before.
SKIPPED, SCALE, RATE, NORM = "train/amp_skipped", "train/amp_scale", "train/lr", "train/grad_norm"
ANOMALY = "torch.autograd.set_detect_anomaly(True) names the operation."


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBreak:
    """The losses of a run that are not finite.

    `before` (n,) are the losses before the first one, in order. `norm_step` is the first step whose
    gradient norm is not finite, None if unknown.
    """

    step: int
    count: int
    steps: int
    recovered: bool
    before: Floats
    norm_step: int | None
    clips: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRecord:
    """What the store has on learning: values of the newest steps, and broken losses."""

    steps: int = 0
    skipped: float | None = None
    scale: float | None = None
    rates: tuple[float, ...] = ()  # of the newest steps
    zero_rate: float = 0.0  # fraction of all steps since the last learning rate above 0
    broken: LossBreak | None = None


def read_learning(reader: StoreReader) -> LearningRecord:
    """Return what a store has on learning. Raises StoreError."""
    info = reader.find(Stream.STEPS)
    if info is None:
        return LearningRecord()
    newest = read_newest(reader, info)
    rates = newest.with_keys((RATE,)).mean[0]
    return LearningRecord(
        steps=int(newest.step[-1]) if len(newest) else 0,
        skipped=last_value(newest, SKIPPED),
        scale=last_value(newest, SCALE),
        rates=tuple(rates[np.isfinite(rates)][-ZERO_RATE_STEPS:].tolist()),
        zero_rate=_zero_rate(reader, info.id, info.rows),
        broken=_read_break(reader, info.id, info.rows),
    )


def _bucket(rows: int) -> int:
    """Return the number of steps in a bucket of a whole run."""
    bucket = 1
    while rows / bucket > MAX_BUCKETS:
        bucket *= 2
    return bucket


def _zero_rate(reader: StoreReader, series: int, rows: int) -> float:
    """Return the fraction of steps since the last learning rate above 0."""
    rates = reader.read(series, 0, rows, _bucket(rows)).with_keys((RATE,)).mean[0]
    known = rates[np.isfinite(rates)]
    above = np.flatnonzero(known)
    return 1 - (above[-1] + 1) / len(known) if len(above) else 1.0


def _read_break(reader: StoreReader, series: int, rows: int) -> LossBreak | None:
    events = reader.events(limit=EVERY, kind="nan")
    if not events:
        return None
    step = events[0].step
    bucket = _bucket(rows)
    whole = reader.read(series, 0, rows, bucket).with_keys((LOSS, NORM))
    start, stop = reader.rows_between(series, "step", step - LOSSES_BEFORE, step - 1)
    losses = reader.read(series, start, stop, 1).with_keys((LOSS,)).mean[0]
    # A last bucket is mixed if the loss has only just recovered.
    last = reader.read(series, max(0, rows - 1), rows, 1).with_keys((LOSS,))
    norms = whole.step[whole.nonfinite[1] > 0]
    return LossBreak(
        step=step,
        count=int(whole.nonfinite[0].sum()),
        steps=int(whole.count[0].sum() + whole.nonfinite[0].sum()),
        recovered=bool(last.count[0].sum()),
        before=losses[np.isfinite(losses)],
        norm_step=int(norms[0]) if len(norms) and bucket == 1 else None,
        clips=bool((whole.count[1] + whole.nonfinite[1]).sum()),
    )


def learning_diagnoses(
    record: LearningRecord, facts: TrainingFacts | None, setup: RunSetup
) -> list[BottleneckDiagnosis]:
    """Return what keeps a run from learning, a broken loss first."""
    facts = facts or TrainingFacts()
    found = [] if record.broken is None else [_broken_loss(record, facts.non_finite, setup)]
    skips = _skipped_steps(record)
    return [*found, *skips, *_useless_updates(record, facts.learning)]


def _broken_loss(
    record: LearningRecord, seen: NonFinite | None, setup: RunSetup
) -> BottleneckDiagnosis:
    broken = record.broken
    assert broken is not None
    many = f"{broken.count:,} of {broken.steps:,} losses are" if broken.count > 1 else "One loss is"
    rest = ", and the loss is finite again" if broken.recovered else ""
    text = f"{many} NaN or infinite, from step {broken.step:,} on{rest}."
    grows = _grows(broken.before)
    where = f"step {broken.step:,}"
    if seen is not None and seen.step == broken.step and seen.inputs:
        batch = f" (batch {seen.batch} of its pass, from 0)" if seen.batch is not None else ""
        text += f" The input of {where}{batch} has NaN or infinite values."
        return BottleneckDiagnosis(
            kind=NOT_FINITE,
            cause="input",
            text=text,
            next=Recommendation("Look at the samples of that batch."),
        )
    if grows:
        low, last = float(broken.before.min()), float(broken.before[-1])
        text += f" Before it the loss grew from {low:.3g} to {last:.3g}."
        return BottleneckDiagnosis(
            kind=NOT_FINITE, cause="diverged", text=text, next=_lower_rate(setup, broken)
        )
    if record.scale is not None and record.skipped:
        text += f" GradScaler has skipped {record.skipped:,.0f} steps."
    is_gradient = broken.norm_step is not None and broken.norm_step <= broken.step
    has_broken_weights = seen is not None and seen.step == broken.step and seen.weights
    if is_gradient or has_broken_weights:
        at = broken.norm_step if is_gradient else broken.step - 1
        text += f" The gradient was not finite at step {at:,}, before the loss was not."
        return BottleneckDiagnosis(
            kind=NOT_FINITE,
            cause="gradient",
            text=text,
            next=Recommendation(
                "An operation has no finite gradient there, such as sqrt or norm at 0, or log of "
                f"0: {ANOMALY}"
            ),
        )
    if seen is not None and seen.step == broken.step and seen.inputs is False:
        text += " Its input and the weights were finite."
    return BottleneckDiagnosis(
        kind=NOT_FINITE,
        text=text,
        next=Recommendation(
            f"An operation of the forward pass overflows or divides by 0 at {where}: check it."
        ),
    )


def _grows(losses: Floats) -> bool:
    """Return True if the losses rose strongly to the last of them."""
    if len(losses) < 2 or losses.min() <= 0:
        return False
    return bool(losses[-1] >= GROWTH * losses.min() and losses[-1] == losses.max())


def _lower_rate(setup: RunSetup, broken: LossBreak) -> Recommendation:
    rate = setup.config.get("learning_rate")
    if setup.own and isinstance(rate, float) and rate > 0:
        text = f"Try learning_rate {rate / 10:.3g}."
        return Recommendation(text, name="learning_rate", value=rate / 10)
    clip = "" if broken.clips else ", or clip the gradients"
    return Recommendation(f"Try a lower learning rate, or a warm-up of it{clip}.")


def _skipped_steps(record: LearningRecord) -> Iterator[BottleneckDiagnosis]:
    skipped = record.skipped or 0.0
    if skipped < MIN_SKIPPED or skipped < MOST_SKIPPED * (skipped + record.steps):
        return
    scale = f", its scale is {record.scale:g}" if record.scale is not None else ""
    yield BottleneckDiagnosis(
        kind=NO_LEARNING,
        cause="steps-skipped",
        text=f"GradScaler has skipped {skipped:,.0f} of {skipped + record.steps:,.0f} "
        f"steps{scale}: a gradient is NaN or infinite at every scale, and the weights do not "
        "change.",
        next=Recommendation(f"Not the scale, an operation of the model is at fault: {ANOMALY}"),
    )


def _useless_updates(
    record: LearningRecord, learning: LearningFacts | None
) -> Iterator[BottleneckDiagnosis]:
    is_zero = len(record.rates) == ZERO_RATE_STEPS and not any(record.rates)
    if is_zero and record.zero_rate >= MIN_ZERO_RATE:
        yield BottleneckDiagnosis(
            kind=NO_LEARNING,
            cause="learning-rate-zero",
            text=f"The learning rate was 0 in each of the last {ZERO_RATE_STEPS} steps.",
            next=Recommendation("Check the schedule: its number of steps, and where it is called."),
        )
    if learning is None:
        return
    made = f" (made in {learning.built})" if learning.built else ""
    enough = learning.checks >= MIN_CHECKS
    if enough and 0 < learning.parameters == learning.without_gradient:
        yield BottleneckDiagnosis(
            kind=NO_LEARNING,
            cause="no-gradient",
            text=f"None of the {learning.parameters} parameters of the optimizer{made} gets a "
            "gradient: its steps change nothing.",
            next=Recommendation(
                "Make the optimizer after the last change of the model, with parameters that the "
                "loss depends on."
            ),
        )
    if learning.in_eval_mode >= MIN_EVAL_CHECKS:
        yield BottleneckDiagnosis(
            kind=NO_LEARNING,
            cause="eval-mode",
            text="The model trains in eval mode, in each of the newest "
            f"{learning.in_eval_mode} steps that were checked: its dropout and normalization "
            "layers do not act as in training.",
            next=Recommendation("Call model.train() before the loop, and after each validation."),
        )
    if learning.clear_checks >= MIN_CHECKS and learning.never_cleared == learning.clear_checks:
        yield BottleneckDiagnosis(
            kind=NO_LEARNING,
            cause="gradients-never-cleared",
            text="Gradients are never cleared: each step adds to those of all steps before, in "
            f"each of {learning.clear_checks} steps that were checked.",
            next=Recommendation("Call optimizer.zero_grad() before each backward()."),
        )
