"""What a diagnosis of a run's steps consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.run_setup import Recommendation

MIN_STEPS = 20  # Minimum number of steady steps, as in TraceML.

IsSettingAllowed = Callable[[str, Any], bool]


class BottleneckKind(StrEnum):
    """What costs a run its time. The last three name no cause."""

    INPUT = "input-bound"
    TRANSFER = "transfer-bound"
    LAUNCH = "launch-bound"
    COMPUTE = "compute-bound"
    THROTTLED = "throttled"
    CONTENTION = "cpu-contention"
    HOST = "host-bound"
    BLOCKED = "blocked"
    SYNC = "sync-bound"
    RECOMPILING = "recompiling"
    SLOWING = "slowing-down"
    STRAGGLER = "straggler"  # Found in the steps of all ranks, never by `verdicts`.
    NOT_FINITE = "loss-not-finite"  # Found in the events of an ended run, never by `verdicts`.
    NO_LEARNING = "no-learning"  # Found in what a run learns, never by `verdicts`.
    SIMULATED = "simulated"
    UNCLEAR = "no single cause"
    TOO_YOUNG = "not enough data yet"

    @property
    def names_a_cause(self) -> bool:
        """False for a verdict that abstains."""
        abstains = (BottleneckKind.SIMULATED, BottleneckKind.UNCLEAR, BottleneckKind.TOO_YOUNG)
        return self not in abstains


PHASES = {
    BottleneckKind.INPUT: "data",
    BottleneckKind.TRANSFER: "copy",
    BottleneckKind.LAUNCH: "launch",
    BottleneckKind.COMPUTE: "compute",
    BottleneckKind.THROTTLED: "compute",
}
"""Phase of a step by kind; others concern no single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAverages:
    """Means over a window of steady steps; None if not recorded.

    Times are seconds per step. `long_waits` are the number and mean of a few waits for data that
    take most of the wait. `computing` is forward, backward and optimizer. `utilization`,
    `throttled` and `host_cpu` are fractions: of time, of samples with an abnormal clocks event
    reason, and of all cores. `process_cpu` is in cores. Clocks are in MHz, and `sm_clock_max` is
    the run's maximum.
    """

    steps: int
    step_time: float = 0.0
    data_wait: float | None = None
    long_waits: tuple[int, float] | None = None
    computing: float | None = None
    copies: float | None = None
    device_time: float | None = None
    gpu_wait: float | None = None
    utilization: float | None = None
    process_cpu: float | None = None
    host_cpu: float | None = None
    throttled: float | None = None
    throttle_words: tuple[str, ...] = ()
    sm_clock: float | None = None
    sm_clock_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The parts of a step as fractions of its wall time; they sum to 1."""

    compute: float
    data: float
    copies: float
    other: float  # Gaps between launches on a GPU; any wait but that for data on a CPU.

    @property
    def idle(self) -> float:
        """The fraction in which the device does not compute."""
        return self.data + self.copies + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckDiagnosis:
    """Verdict on a run's steps as a sentence, with a recommendation if it has a cause."""

    kind: BottleneckKind
    text: str
    cause: str | None = None  # A special case of the kind.
    share: float | None = None  # None without a cause.
    next: Recommendation | None = None
    parts: StepBreakdown | None = None  # None if unknown.

    @property
    def phase(self) -> str | None:
        """The phase of the verdict."""
        return PHASES.get(self.kind)
