"""Runs or resumes a sweep: one trial after the other until its state has no next trial.

A stopped or killed sweep resumes at the end of trials.jsonl. The incomplete round is repeated: its
trials are compared with each other, and hours may have passed.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import open_for_append
from stepscope.lab.comparison import MAX_ATTEMPTS, NextTrial
from stepscope.lab.folder import (
    INTERRUPTED,
    SCHEMA,
    SWEEP_JSON,
    TRIALS_FILE,
    SweepError,
    Trial,
    only_one,
    read_sweep,
    read_trials,
    write_json,
    write_trials,
)
from stepscope.lab.plan import SAMPLE_S, SweepPlan
from stepscope.lab.result_json import content, finite
from stepscope.lab.sweep_state import BASELINE, SweepPhase, SweepState, replay_sweep
from stepscope.lab.trial_process import TrialProcess
from stepscope.run import process_identity
from stepscope.settings.setting import AppliedSetting

MIN_STEPS = 30
MIN_WARMUP_STEPS = 10
CALIBRATION_WARMUP_STEPS = 5
MIN_TIMEOUT_S = 900.0  # torch.compile alone can take minutes.
TIMEOUT_FACTOR = 20.0  # Timeout over the duration of the longest trial so far.
SAME_MACHINE = ("host", "gpu", "torch", "rate")
"""Keys of `machine` that must be equal in all trials of a sweep, or their speeds do not compare."""


class SweepRunner:
    """One sweep in its folder; `changed` is called with each new content of sweep.json."""

    def __init__(
        self,
        folder: Path,
        plan: SweepPlan,
        process: TrialProcess,
        changed: Callable[[dict[str, Any]], None] = lambda sweep: None,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._process = process
        self._changed = changed
        self._trials: list[Trial] = []

    def run(self) -> dict[str, Any]:
        """Measure the remaining trials; return sweep.json. Raises SweepError and OSError."""
        with only_one(self._folder):
            try:
                self._created = float(read_sweep(self._folder)["created"])
            except (SweepError, ValueError, KeyError, TypeError):
                self._created = time.time()
            self._drop_incomplete_round()
            return self._run()

    def _drop_incomplete_round(self) -> None:
        """Read the trials so far; remove those of the incomplete round from the file."""
        self._trials = read_trials(self._folder)
        _, state = self._state()
        key, number = state.open_round or ("", 0)
        self._trials = [one for one in self._trials if one.contest != key or one.round < number]
        write_trials(self._folder, self._trials)

    @property
    def _machine(self) -> dict[str, Any]:
        """The machine of the first trial, which is one of the baseline."""
        return next((one.machine for one in self._trials if one.ok), {})

    def _run(self) -> dict[str, Any]:
        while True:
            plan, state = self._state()
            if state.failed is not None:
                return self._write(plan, state, "failed", state.failed)
            if state.next is None:
                return self._write(plan, state, "finished", None)
            if self._process.stopping:
                return self._write(plan, state, "stopped", INTERRUPTED)
            self._write(plan, state, "running", None)
            changes = state.changes[state.next.name]
            answer = self._process.take(_job(plan, state.next, changes), self._timeout_s())
            if self._process.stopping:
                continue
            if answer.get("stops"):
                return self._write(plan, state, "stopped", answer["reason"])
            self._append(state.next, self._same_machine(answer))

    def _same_machine(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of a trial, or a reason if its machine is not that of the sweep."""
        first, machine = self._machine, answer.get("machine") or {}
        for key in SAME_MACHINE:
            if key in first and key in machine and first[key] != machine[key]:
                reason = f"{key}: the sweep was measured with {first[key]!r}, got {machine[key]!r}."
                return {"seconds": answer["seconds"], "reason": reason}
        return answer

    def _state(self) -> tuple[SweepPlan, SweepState]:
        """Return the plan with its number of steps, and the state of the sweep."""
        first = [one for one in self._trials if one.contest == SweepPhase.CALIBRATE]
        measured = next((one for one in first if one.ok), None)
        if measured is not None:
            plan = with_steps(self._plan, measured.metrics["step_time"])
            plan = plan.after_probe(measured)
            return plan, replay_sweep(plan, self._trials)
        plan = replace(
            self._plan,
            steps=self._plan.steps or MIN_STEPS,
            warmup=self._plan.warmup or CALIBRATION_WARMUP_STEPS,
        )
        state = SweepState(SweepPhase.CALIBRATE, changes={BASELINE: {}})
        if len(first) < MAX_ATTEMPTS:
            state.next = NextTrial(SweepPhase.CALIBRATE, 0, BASELINE)
        else:
            state.failed = f"The baseline cannot be measured: {first[-1].reason}"
        return plan, state

    def _timeout_s(self) -> float:
        longest_s = max((one.seconds for one in self._trials if one.ok), default=0.0)
        return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * longest_s)

    def _append(self, trial: NextTrial, answer: Mapping[str, Any]) -> None:
        """Append a trial to trials.jsonl, durably before the next one begins."""
        reason, metrics = answer.get("reason"), finite(answer.get("metrics") or {})
        done = Trial(
            contest=trial.contest,
            round=trial.round,
            name=trial.name,
            reason=_invalid_rate(metrics) if reason is None else reason,
            seconds=float(answer["seconds"]),
            metrics=metrics,
            machine=answer.get("machine") or {},
            settings=msgspec.convert(answer.get("settings") or [], list[AppliedSetting]),
        )
        with open(open_for_append(self._folder / TRIALS_FILE), "wb") as file:
            file.write(msgspec.json.encode(done) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._trials.append(done)

    def _write(
        self, plan: SweepPlan, state: SweepState, status: str, reason: str | None
    ) -> dict[str, Any]:
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
                "machine": self._machine,
            }
        )
        write_json(self._folder / SWEEP_JSON, sweep)
        self._changed(sweep)
        return sweep


def _job(plan: SweepPlan, trial: NextTrial, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job of a trial; that of the first one has the settings to probe."""
    job = {
        **plan.subject(),
        "changes": dict(changes),
        "seed": seed_of(plan, trial),
        "warmup": plan.warmup,
        "steps": plan.steps,
    }
    if trial.contest == SweepPhase.CALIBRATE and plan.probe:
        job["probe"] = plan.probe
    return job


def with_steps(plan: SweepPlan, step_s: float) -> SweepPlan:
    """Return the plan with the automatic `steps` and `warmup`; a step takes `step_s` seconds."""
    steps = plan.steps or max(MIN_STEPS, math.ceil(SAMPLE_S / step_s))
    return replace(plan, steps=steps, warmup=plan.warmup or max(MIN_WARMUP_STEPS, steps // 4))


def seed_of(plan: SweepPlan, trial: NextTrial) -> int:
    """Return the seed of a trial: equal within a round, new in each comparison."""
    return plan.seed + zlib.crc32(trial.contest.encode()) % 10**9 + trial.round


def _invalid_rate(metrics: Mapping[str, Any]) -> str | None:
    """Return why metrics have no valid throughput, or None."""
    for name in ("samples_per_sec", "step_time"):
        value = metrics.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value < math.inf:
            return f"{name}: must be a number above 0, got {value!r}."
    return None
