"""Runs or resumes a sweep: one trial after the other until its state has no next trial.

A stopped or killed sweep resumes at the end of samples.jsonl. The incomplete round is repeated: its
trials are compared with each other, and hours may have passed.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import open_for_append, open_regular_file
from stepscope.lab.comparison import (
    MAX_ATTEMPTS,
    ComparisonState,
    NextTrial,
    VariantComparison,
    of_contest,
)
from stepscope.lab.folder import (
    INTERRUPTED,
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
from stepscope.lab.plan import SweepPlan
from stepscope.lab.result_json import CALIBRATE, content, finite
from stepscope.lab.sweep_state import BASELINE, SweepPhase, SweepState, replay_sweep
from stepscope.lab.trial_process import TrialProcess
from stepscope.run import process_identity
from stepscope.run.rank_info import AppliedSetting

MIN_STEPS = 30
MIN_WARMUP_STEPS = 10
CALIBRATION_WARMUP_STEPS = 5
FIRST_TIMEOUT_S = 900.0
MIN_TIMEOUT_S = 300.0
TIMEOUT_FACTOR = 20.0  # Timeout over the duration of the longest trial so far.
COMPILE_TIMEOUT_S = 1800.0
SAME_MACHINE = ("host", "gpu", "torch", "rate")
"""Keys of `machine` that must be equal in all trials of a sweep."""


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
        self._session = 0

    def run(self) -> dict[str, Any]:
        """Measure the remaining trials; return sweep.json. Raises SweepError and OSError."""
        with only_one(self._folder):
            try:
                self._created = float(read_sweep(self._folder)["created"])
            except (SweepError, ValueError, KeyError, TypeError):
                self._created = time.time()
            self._resume()
            return self._run()

    def _resume(self) -> None:
        """Read the trials so far, without those of the incomplete round."""
        _drop_incomplete_line(self._folder / SAMPLES)
        read = read_samples(self._folder)
        self._session = 1 + max((one.session for one in read), default=-1)
        self._trials = read
        _, state = self._state()
        contest, number = state.open_round or ("", 0)
        # Later rounds too: other rules may have ended a variant earlier than those of this version.
        self._trials = [one for one in read if one.contest != contest or one.round < number]

    @property
    def _machine(self) -> dict[str, Any]:
        """The machine of the trials so far, that of the baseline if it was measured."""
        measured = [one for one in self._trials if one.ok and one.machine]
        return min(measured, key=lambda one: one.name != BASELINE).machine if measured else {}

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
            answer = self._process.take(_job(plan, state, state.next), self._timeout_s(state))
            if self._process.stopping:
                continue
            if answer.get("new_sweep"):
                ended = f"{answer['reason']} Start a new sweep."
                return self._write(plan, state, "failed", ended)
            changes = state.changes[state.next.name]
            if (reason := self._stop_reason(answer, changes)) is not None:
                return self._write(plan, state, "stopped", reason)
            if (reason := self._not_comparable(answer, changes)) is not None:
                answer = {"seconds": answer["seconds"], "reason": reason}
            self._append(state.next, answer)

    def _not_comparable(self, answer: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
        """Return why a variant measures something else than the baseline."""
        base = next((one.machine for one in self._trials if one.ok and one.name == BASELINE), {})
        machine = answer.get("machine") or {}
        if (key := _difference(_changed_by(changes), base, machine)) is None:
            return None
        return (
            f"{key}: the baseline has {base[key]!r}, this variant has {machine[key]!r}, "
            "so their speeds cannot be compared."
        )

    def _stop_reason(self, answer: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
        """Return why no trial can be measured now, for reasons other than its settings."""
        if answer.get("stops"):
            return f"{answer['reason']} Resume continues from here once that is fixed."
        before, now = self._machine, answer.get("machine") or {}
        # Trials before the first one of the baseline are of variants, which may differ from it.
        known = any(one.ok and one.name == BASELINE for one in self._trials)
        free = _changed_by(changes) if known else {"rate", "gpu"}
        same = [key for key in SAME_MACHINE if key not in free]
        if (key := _difference(same, before, now)) is None:
            return None
        return (
            f"{key}: this sweep was measured with {before[key]!r}, got {now[key]!r}. "
            "Resume it there, or start a new sweep here."
        )

    def _state(self) -> tuple[SweepPlan, SweepState]:
        """Return the plan with its number of steps, and the state of the sweep."""
        first = of_contest(self._trials, CALIBRATE)
        measured = next((one for one in first if one.ok), None)
        if measured is not None or (self._plan.steps and not self._plan.probe):
            plan, failed = with_steps(self._plan, measured), None
            if measured is not None:
                plan, failed = plan.after_probe(measured)
            state = replay_sweep(plan, self._trials)
            state.failed = state.failed or failed
            return plan, state
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
        return limit + COMPILE_TIMEOUT_S * self._plan.compiles(state.changes[state.next.name])

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
            settings=msgspec.convert(answer.get("settings") or [], list[AppliedSetting]),
        )
        with open(open_for_append(self._folder / SAMPLES), "wb") as file:
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
                "machine": {"device": plan.device_name, **self._machine},
            }
        )
        write_json(self._folder / SWEEP_JSON, sweep)
        self._changed(sweep)
        return sweep


def _drop_incomplete_line(path: Path) -> None:
    """Remove what a kill has left of the last line; only the holder of the lock may."""
    with suppress(FileNotFoundError), open(open_regular_file(path, writable=True), "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _difference(
    keys: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> str | None:
    """Return the first key that two machines have with different values."""
    both = (key for key in keys if key in before and key in now)
    return next((key for key in both if before[key] != now[key]), None)


def _changed_by(changes: Mapping[str, Any]) -> Set[str]:
    """Return the keys of `machine` in which a variant may differ from the baseline."""
    keys = {"rate"} if changes else set()
    return keys | {"gpu"} if any(name.startswith("env:") for name in changes) else keys


def _job(plan: SweepPlan, state: SweepState, trial: NextTrial) -> dict[str, Any]:
    calibrates = trial.contest == CALIBRATE
    return {
        **plan.subject(),
        **({"probe": plan.probe} if calibrates and plan.probe else {}),
        "changes": dict(state.changes[trial.name]),
        "seed": seed_of(plan, trial),
        "warmup": CALIBRATION_WARMUP_STEPS if calibrates else plan.warmup,
        "steps": 0 if calibrates else plan.steps,
        "seconds": plan.sample_s,
    }


def with_steps(plan: SweepPlan, measured: Trial | None) -> SweepPlan:
    """Return the plan with the automatic `steps` (7 of 10 of a whole script) and `warmup`."""
    steps = plan.steps
    if not steps:
        assert measured is not None
        steps = math.ceil(plan.sample_s / measured.metrics["step_time"])
        whole = measured.metrics.get("script_steps") or math.inf
        steps = max(MIN_STEPS, int(min(steps, 0.7 * whole)))
    return replace(plan, steps=steps, warmup=plan.warmup or max(MIN_WARMUP_STEPS, steps // 4))


def seed_of(plan: SweepPlan, trial: NextTrial) -> int:
    """Return the seed of a trial: equal within a round, new in each comparison."""
    return plan.seed + zlib.crc32(trial.contest.encode()) % 10**9 + trial.round
