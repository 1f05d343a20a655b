"""Runs or resumes a sweep: one trial after the other until its state has no next trial.

The folder is complete after each trial, so a stopped or killed sweep resumes at the end of
samples.jsonl. The incomplete round is repeated: its trials are compared with each other, and hours
may have passed.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import open_for_append
from stepscope.run import process_identity
from trainer.config_validation import TrainDevice
from trainer.lab.comparison import (
    MAX_ATTEMPTS,
    ComparisonState,
    NextTrial,
    VariantComparison,
    of_contest,
)
from trainer.lab.folder import (
    SAMPLES,
    SCHEMA,
    SWEEP_JSON,
    SweepError,
    Trial,
    no_rate,
    only_one,
    read_samples,
    read_sweep,
    write_json,
)
from trainer.lab.plan import SweepPlan
from trainer.lab.result_json import CALIBRATE, content, finite
from trainer.lab.sweep_state import BASELINE, SweepPhase, SweepState, replay_sweep
from trainer.lab.trial_process import TrialProcess
from trainer.lab.variants import compiles

MIN_STEPS = 30
MIN_WARMUP_STEPS = 10
CALIBRATION_WARMUP_STEPS = 5
FIRST_TIMEOUT_S = 900.0
MIN_TIMEOUT_S = 300.0
TIMEOUT_FACTOR = 20.0  # Timeout over the duration of the longest trial so far.
COMPILE_TIMEOUT_S = 1800.0
SAME_MACHINE = ("host", "gpu", "torch")
"""Keys of `machine` that must be equal in all trials of a sweep."""


class SweepRunner:
    """One sweep in its folder; `changed` is called with each new content of sweep.json."""

    def __init__(
        self,
        folder: Path,
        plan: SweepPlan,
        devices: Sequence[TrainDevice],
        process: TrialProcess,
        changed: Callable[[dict[str, Any]], None] = lambda sweep: None,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._devices = devices
        self._process = process
        self._changed = changed
        self._trials: list[Trial] = []
        self._session = 0

    def run(self) -> dict[str, Any]:
        """Measure the remaining trials; return the final content of sweep.json.

        Raises SweepError if another process runs this sweep, OSError if the folder cannot be
        written.
        """
        with only_one(self._folder):
            try:
                self._created = float(read_sweep(self._folder)["created"])
            except (SweepError, ValueError, KeyError, TypeError):
                self._created = time.time()
            self._resume()
            return self._run()

    def _resume(self) -> None:
        """Read the trials so far, without those of the incomplete round."""
        read = read_samples(self._folder)
        self._session = 1 + max((one.session for one in read), default=-1)
        self._trials = read
        _, state = self._state()
        contest, number = state.open_round or ("", 0)
        # Later rounds too: other rules may have ended a variant earlier than those of this version.
        self._trials = [one for one in read if one.contest != contest or one.round < number]

    @property
    def _machine(self) -> dict[str, Any]:
        """The machine of the trials so far."""
        return next((one.machine for one in self._trials if one.ok and one.machine), {})

    def _run(self) -> dict[str, Any]:
        while True:
            plan, state = self._state()
            if state.failed is not None:
                return self._write(plan, state, "failed", state.failed)
            if state.next is None:
                return self._write(plan, state, "finished", None)
            if self._process.stopping:
                return self._write(plan, state, "stopped", "Stopped; resume continues from here.")
            self._write(plan, state, "running", None)
            answer = self._process.take(_job(plan, state, state.next), self._timeout_s(state))
            if self._process.stopping:
                continue
            if (reason := self._stop_reason(answer)) is not None:
                return self._write(plan, state, "stopped", reason)
            self._append(state.next, answer)

    def _stop_reason(self, answer: Mapping[str, Any]) -> str | None:
        """Return why no trial can be measured now, for reasons other than its settings."""
        if answer.get("stops"):
            return f"{answer['reason']} Resume continues from here once that is fixed."
        machine = answer.get("machine") or {}
        for key in SAME_MACHINE:
            before, now = self._machine.get(key), machine.get(key)
            if key in machine and key in self._machine and before != now:
                return (
                    f"{key}: this sweep was measured with {before!r}, got {now!r}. "
                    "Resume it there, or start a new sweep here."
                )
        return None

    def _state(self) -> tuple[SweepPlan, SweepState]:
        """Return the plan with its number of steps, and the state of the sweep."""
        first = of_contest(self._trials, CALIBRATE)
        measured = next((one for one in first if one.ok), None)
        if self._plan.steps or measured is not None:
            plan = with_steps(self._plan, measured)
            return plan, replay_sweep(plan, self._trials, self._devices)
        trial = NextTrial(CALIBRATE, 0, BASELINE)
        comparison, nothing = VariantComparison(CALIBRATE, BASELINE, ()), ComparisonState()
        state = SweepState(SweepPhase.CALIBRATING, nothing, comparison, nothing, trial)
        state.changes = {BASELINE: {}}
        if len(first) >= MAX_ATTEMPTS:
            state.next, state.failed = None, f"The baseline cannot be measured: {first[-1].reason}"
        return self._plan, state

    def _timeout_s(self, state: SweepState) -> float:
        assert state.next is not None
        took = [one.seconds for one in self._trials if one.ok]
        limit = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * max(took)) if took else FIRST_TIMEOUT_S
        return limit + COMPILE_TIMEOUT_S * compiles(state.changes[state.next.name])

    def _append(self, trial: NextTrial, answer: Mapping[str, Any]) -> None:
        """Append a trial to samples.jsonl, durably before the next one begins."""
        reason, metrics = answer.get("reason"), finite(answer.get("metrics") or {})
        done = Trial(
            contest=trial.contest,
            round=trial.round,
            name=trial.name,
            reason=no_rate(metrics) if reason is None else reason,
            seconds=float(answer["seconds"]),
            ended=time.time(),
            session=self._session,
            metrics=metrics,
            machine=answer.get("machine") or {},
        )
        with open(open_for_append(self._folder / SAMPLES), "wb") as file:
            file.write(msgspec.json.encode(done) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._trials.append(done)

    def _write(
        self, plan: SweepPlan, state: SweepState, status: str, reason: str | None
    ) -> dict[str, Any]:
        device = next((d for d in self._devices if d.id == plan.config.device), None)
        sweep: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "id": self._folder.name,
                "status": status,
                "reason": reason,
                "created": self._created,
                "updated": time.time(),
                **process_identity(),
                **content(plan, self._trials, state, over=status != "running"),
                "machine": {"device": None if device is None else device.name, **self._machine},
            }
        )
        write_json(self._folder / SWEEP_JSON, sweep)
        self._changed(sweep)
        return sweep


def _job(plan: SweepPlan, state: SweepState, trial: NextTrial) -> dict[str, Any]:
    calibrates = trial.contest == CALIBRATE
    return {
        "config": plan.config.to_dict(),
        "changes": dict(state.changes[trial.name]),
        "seed": seed_of(plan, trial),
        "warmup": CALIBRATION_WARMUP_STEPS if calibrates else plan.warmup,
        "steps": 0 if calibrates else plan.steps,
        "seconds": plan.sample_s,
    }


def with_steps(plan: SweepPlan, measured: Trial | None) -> SweepPlan:
    """Return the plan with the automatic `steps` and `warmup`.

    The steps take `sample_s` at the step time of the first trial; the warm-up is a quarter more.
    """
    steps = plan.steps
    if not steps:
        assert measured is not None
        steps = max(MIN_STEPS, math.ceil(plan.sample_s / measured.metrics["step_time"]))
    return replace(plan, steps=steps, warmup=plan.warmup or max(MIN_WARMUP_STEPS, steps // 4))


def seed_of(plan: SweepPlan, trial: NextTrial) -> int:
    """Return the seed of a trial: equal within a round, new in each comparison."""
    return plan.seed + zlib.crc32(trial.contest.encode()) % 10**9 + trial.round
