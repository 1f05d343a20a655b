"""Runs a sweep, or goes on with one: a sample after the other, until its course has no next.

All that is known stands in the folder after each sample. So a sweep that was stopped, or killed,
goes on where samples.jsonl ends. The round that was under way is taken again as a whole: its
samples are compared with each other, and hours may have passed.
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
from trainer.lab.comparison import TRIES, ComparisonState, NextTrial, VariantComparison, of_contest
from trainer.lab.folder import (
    SAMPLES,
    SCHEMA,
    SWEEP_JSON,
    SweepError,
    only_one,
    read_sweep,
    write_json,
)
from trainer.lab.plan import SweepPlan
from trainer.lab.result_json import CALIBRATE, content, finite
from trainer.lab.sweep_state import BASELINE, SweepPhase, SweepState, replay_sweep
from trainer.lab.trial_log import Trial, no_rate, read_samples
from trainer.lab.trial_process import TrialProcess
from trainer.lab.variants import compiles

FEWEST_STEPS = 30
FEWEST_WARM_STEPS = 10
CALIBRATION_WARM_STEPS = 5
FIRST_TIMEOUT_S = 900.0
LEAST_TIMEOUT_S = 300.0
TIMES_LONGER = 20.0
"""A sample may take this many times the longest so far, and LEAST_TIMEOUT_S in any case."""
SAME_MACHINE = ("host", "gpu", "torch")
"""What must be equal in all samples of a sweep, by its name in `machine`."""
COMPILE_TIMEOUT_S = 1800.0


class SweepRunner:
    """One sweep in its folder; `changed` is called with each new content of sweep.json."""

    def __init__(
        self,
        folder: Path,
        plan: SweepPlan,
        devices: Sequence[TrainDevice],
        taker: TrialProcess,
        changed: Callable[[dict[str, Any]], None] = lambda sweep: None,
    ) -> None:
        self._folder = folder
        self._asked = plan
        self._devices = devices
        self._taker = taker
        self._changed = changed
        self._samples: list[Trial] = []
        self._session = 0

    def run(self) -> dict[str, Any]:
        """Measure what is left; return the last content of sweep.json.

        Raises SweepError while another process works on this sweep, OSError where the folder
        cannot be written.
        """
        with only_one(self._folder):
            self._created = _created(self._folder)
            self._resume()
            return self._run()

    def _resume(self) -> None:
        """Take up the samples so far, without those of the round that was under way."""
        read = read_samples(self._folder)
        self._session = 1 + max((one.session for one in read), default=-1)
        self._samples = read
        _, where = self._stand()
        contest, number = where.open_round or ("", 0)
        # Later rounds too: other rules may have ended an arm earlier than those of this version.
        self._samples = [one for one in read if one.contest != contest or one.round < number]

    @property
    def _machine(self) -> dict[str, Any]:
        """The machine of the samples so far."""
        return next((one.machine for one in self._samples if one.ok and one.machine), {})

    def _run(self) -> dict[str, Any]:
        while True:
            plan, where = self._stand()
            if where.failed is not None:
                return self._write(plan, where, "failed", where.failed)
            if where.next is None:
                return self._write(plan, where, "finished", None)
            if self._taker.stopping:
                return self._write(plan, where, "stopped", "Stopped; resume continues from here.")
            self._write(plan, where, "running", None)
            taken = self._taker.take(self._job(plan, where), self._timeout_s(where))
            if self._taker.stopping:
                continue
            if (reason := self._cannot_go_on(taken)) is not None:
                return self._write(plan, where, "stopped", reason)
            self._keep(where.next, taken)

    def _cannot_go_on(self, taken: Mapping[str, Any]) -> str | None:
        """Say why no sample can be taken now, for which no setting is to blame."""
        if taken.get("stops"):
            return f"{taken['reason']} Resume continues from here once that is fixed."
        machine = taken.get("machine") or {}
        for key in SAME_MACHINE:
            before, now = self._machine.get(key), machine.get(key)
            if key in machine and key in self._machine and before != now:
                return (
                    f"{key}: this sweep was measured with {before!r}, got {now!r}. "
                    "Resume it there, or start a new sweep here."
                )
        return None

    def _stand(self) -> tuple[SweepPlan, SweepState]:
        """Return the plan with its steps chosen, and where the sweep stands."""
        first = of_contest(self._samples, CALIBRATE)
        measured = next((one for one in first if one.ok), None)
        if self._asked.steps or measured is not None:
            plan = with_steps(self._asked, measured)
            return plan, replay_sweep(plan, self._samples, self._devices)
        asked = NextTrial(CALIBRATE, 0, BASELINE)
        contest, nothing = VariantComparison(CALIBRATE, BASELINE, ()), ComparisonState()
        where = SweepState(SweepPhase.CALIBRATING, nothing, contest, nothing, asked)
        where.changes = {BASELINE: {}}
        if len(first) >= TRIES:
            where.next, where.failed = None, f"The baseline cannot be measured: {first[-1].reason}"
        return self._asked, where

    def _job(self, plan: SweepPlan, where: SweepState) -> dict[str, Any]:
        asked = where.next
        assert asked is not None
        calibrates = asked.contest == CALIBRATE
        return {
            "config": plan.config.to_dict(),
            "changes": dict(where.changes[asked.name]),
            "seed": seed_of(plan, asked),
            "warmup": CALIBRATION_WARM_STEPS if calibrates else plan.warmup,
            "steps": 0 if calibrates else plan.steps,
            "seconds": plan.sample_s,
        }

    def _timeout_s(self, where: SweepState) -> float:
        assert where.next is not None
        took = [one.seconds for one in self._samples if one.ok]
        limit = max(LEAST_TIMEOUT_S, TIMES_LONGER * max(took)) if took else FIRST_TIMEOUT_S
        return limit + COMPILE_TIMEOUT_S * compiles(where.changes[where.next.name])

    def _keep(self, asked: NextTrial, taken: Mapping[str, Any]) -> None:
        """Append a sample to samples.jsonl, on the disk before the next one begins."""
        reason, metrics = taken.get("reason"), finite(taken.get("metrics") or {})
        sample = Trial(
            contest=asked.contest,
            round=asked.round,
            name=asked.name,
            reason=no_rate(metrics) if reason is None else reason,
            seconds=float(taken["seconds"]),
            ended=time.time(),
            session=self._session,
            metrics=metrics,
            machine=taken.get("machine") or {},
        )
        with open(open_for_append(self._folder / SAMPLES), "wb") as file:
            file.write(msgspec.json.encode(sample) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._samples.append(sample)

    def _write(
        self, plan: SweepPlan, where: SweepState, status: str, reason: str | None
    ) -> dict[str, Any]:
        device = next((d for d in self._devices if d.id == plan.config.device), None)
        sweep = {
            "schema": SCHEMA,
            "id": self._folder.name,
            "status": status,
            "reason": reason,
            "created": self._created,
            "updated": time.time(),
            **process_identity(),
            **content(plan, self._samples, where, over=status != "running"),
            "machine": {"device": None if device is None else device.name, **self._machine},
        }
        sound: dict[str, Any] = finite(sweep)
        write_json(self._folder / SWEEP_JSON, sound)
        self._changed(sound)
        return sound


def with_steps(plan: SweepPlan, measured: Trial | None) -> SweepPlan:
    """Return the plan with `steps` and `warmup` chosen where they are 0.

    The steps take `sample_s` at the step time of the first sample; the warm-up is a quarter more.
    """
    steps = plan.steps
    if not steps:
        assert measured is not None
        steps = max(FEWEST_STEPS, math.ceil(plan.sample_s / measured.metrics["step_time"]))
    return replace(plan, steps=steps, warmup=plan.warmup or max(FEWEST_WARM_STEPS, steps // 4))


def seed_of(plan: SweepPlan, asked: NextTrial) -> int:
    """Return the seed of a sample: the same for all of a round, and fresh in each contest."""
    return plan.seed + zlib.crc32(asked.contest.encode()) % 10**9 + asked.round


def _created(folder: Path) -> float:
    try:
        return float(read_sweep(folder)["created"])
    except (SweepError, ValueError, KeyError, TypeError):
        return time.time()
