"""Determine the cause of a failed allocation, with the figures that prove it.

Before torch gives up it returns every segment that is wholly free to the driver. So memory that is
still reserved and not allocated lies in pieces between tensors, or belongs to another stream or
pool. For a request R:

    R > available                   why it failed; bytes that the driver can still allocate
    R <= available + cached         fragmentation, if the process has held that much before
    R <= available + others         without the other processes it would fit
    else                            the training itself needs more than the device has: by growth,
                                    or because it is too large

In a step that was never completed free pieces prove nothing, as its peak is still to come.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepscope.common.formatting import format_bytes
from stepscope.host.usage import kills_since
from stepscope.memory.oom import recommendations as plans
from stepscope.memory.oom.recommendations import Allowed
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, OomReport, read_report
from stepscope.run import RunInfo, RunStatus
from stepscope.run_setup import Recommendation, RunSetup, setup_of

FIRST_STEPS = 2  # Steps with atypical memory: optimizer state and workspaces are allocated.
MIN_FRAGMENTED = 0.10  # Of the reserved memory in pieces: with less, the next allocation fails too.
MIN_FRACTION = 0.10
"""Minimum growth, or memory of others, that is the cause, as a fraction of the device: a desktop
takes a few percent."""
STATE_FUNCTIONS = (" _init_group", " init_state")  # of torch, of bitsandbytes
MAX_UNKNOWN = 0.25
"""Maximum fraction of the device held outside torch by unknown processes for a definite cause: a
CUDA context and its libraries take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """The figures of a record that determine the cause; bytes.

    `limit` is the maximum that this process may use of the device, `available` the bytes that the
    driver can still allocate to it, `outside` the bytes in use outside this process's PyTorch
    memory.
    """

    requested: int
    limit: int
    available: int
    allocated: int
    reserved: int
    outside: int

    @property
    def missing(self) -> int:
        """Bytes requested beyond those available; not positive if there were enough."""
        return self.requested - self.available

    @property
    def cached(self) -> int:
        """Bytes reserved and not allocated, in pieces."""
        return self.reserved - self.allocated

    @property
    def demand(self) -> int:
        """Bytes allocated and requested."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> OomFigures | None:
    """Return the figures of a record; None if one is missing or they contradict each other."""
    requested, free = record.requested, record.free
    allocated, reserved = record.allocated, record.reserved
    limit = record.allowed or record.total
    if requested is None or free is None or allocated is None or reserved is None or limit is None:
        return None
    if requested <= 0 or free < 0 or limit <= 0 or not 0 <= allocated <= reserved:
        return None
    total = record.total or limit
    return OomFigures(
        requested=requested,
        limit=limit,
        available=min(free, max(0, limit - reserved)),
        allocated=allocated,
        reserved=reserved,
        outside=max(0, total - free - reserved),
    )


def evidence_of(record: OomRecord, figures: OomFigures | None = None) -> dict[str, str]:
    """Return the figures behind a cause as text, by their label."""
    host = record.host or HostMemory()
    sizes = {
        "Requested": record.requested,
        "Allocated (tensors)": record.allocated,
        "Reserved but free (fragmented)": None if figures is None else figures.cached,
        "Free on the device": record.free,
        "Other processes": record.others,
        "Outside of PyTorch's memory": None if figures is None else figures.outside,
        "Limit of this process": record.allowed,
        "Device total": record.total,
        "Peak allocated so far": record.peak_allocated,
        "Host, available": host.available,
        "Host in all": host.total,
        "This process": host.process,
        "Its child processes": host.children,
    }
    shown = {name: format_bytes(size) for name, size in sizes.items() if size is not None}
    if record.others is None and record.others_reason:
        shown["Other processes"] = f"unknown: {record.others_reason}"
    if record.growth is not None:
        rate = format_bytes(record.growth.bytes_per_step)
        shown["Growth of allocated"] = f"{rate} per step over {record.growth.steps:,} steps"
    if record.allocator:
        shown["Allocator settings"] = record.allocator
    return shown


class OomCause(StrEnum):
    """Why memory ran out; the value is the headline."""

    TOO_LARGE = "Too large to fit"
    OPTIMIZER_STATE = "New optimizer state"
    FRAGMENTATION = "Fragmentation"
    OTHER_PROCESS = "Another process"
    GROWTH = "Growth"
    RETRY = "A retry within except"
    EARLIER = "An earlier model"
    OTHER_DEVICE = "Memory on another GPU"
    HOST = "Host memory, not GPU memory"
    UNKNOWN = "No single cause"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFinding:
    """One sentence on why memory ran out, its evidence, and recommendations, the best first."""

    cause: OomCause
    text: str
    evidence: Mapping[str, str]
    recommendations: tuple[Recommendation, ...]


@dataclass(frozen=True, slots=True)
class _Conclusion:
    cause: OomCause
    text: str
    plan: plans.RecommendationPlan


def diagnose(
    record: OomRecord, setup: RunSetup | None = None, *, allowed: plans.Allowed | None = None
) -> OomFinding:
    """Return the cause of a failed allocation, or `UNKNOWN`.

    `allowed(field, value)` returns True if a setting is possible on this host.
    """
    figures = figures_of(record) if record.memory is MemoryKind.GPU else None
    if record.memory is not MemoryKind.GPU:
        found = _host_cause(record)
    elif figures is None:
        text = "The allocator's counters were not recorded, so the cause is unknown."
        found = _Conclusion(OomCause.UNKNOWN, text, plans.TOO_LARGE)
    else:
        found = (
            _other_device(record, figures)
            or _growth(record, figures)
            or _earlier(record, figures)
            or _retry(record)
            or _fragmentation(record, figures)
            or _others(record, figures)
            or _too_large(record, figures)
            or _unknown(record, figures)
        )
    return OomFinding(
        cause=found.cause,
        text=found.text,
        evidence=evidence_of(record, figures),
        recommendations=plans.recommendations(found.plan, record, setup, allowed),
    )


def _other_device(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return a device that is not the training's: its steps and peaks explain nothing there."""
    if record.trains_on is None or record.device in (None, record.trains_on):
        return None
    text = (
        f"{format_bytes(figures.requested)} was requested on GPU {record.device}, but this process "
        f"trains on GPU {record.trains_on}. It held {format_bytes(figures.allocated)} there."
    )
    return _Conclusion(OomCause.OTHER_DEVICE, text, plans.OTHER_DEVICE)


def _retry(record: OomRecord) -> _Conclusion | None:
    if not record.retries:
        return None
    earlier = "an earlier failure" if record.retries == 1 else f"{record.retries} earlier failures"
    text = (
        f"This allocation failed while the script handled {earlier}. Until its except block ends, "
        "the exception holds the tensors of the earlier attempts."
    )
    return _Conclusion(OomCause.RETRY, text, plans.RETRY)


def _growth(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return growth from batch to batch since the last `backward()`, or from step to step."""
    batches = record.batches
    if batches is not None and _explains(batches.grown, figures):
        rate = format_bytes(batches.bytes_per_step)
        text = (
            f"Each batch since the last backward pass added {rate}: "
            f"{format_bytes(batches.grown)} over {batches.last_step:,} batches, as in an "
            "evaluation that keeps its results on the GPU."
        )
        return _Conclusion(OomCause.GROWTH, text, plans.BATCHES)
    growth = record.growth
    if growth is None or not _explains(growth.grown, figures):
        return None
    grown = min(growth.grown, float(figures.allocated))
    text = (
        f"Allocated memory grew by {format_bytes(growth.bytes_per_step)} per step, by "
        f"{format_bytes(grown)} over {growth.steps:,} steps, until another "
        f"{format_bytes(figures.requested)} did not fit."
    )
    return _Conclusion(OomCause.GROWTH, text, plans.GROWTH)


def _explains(size: float, figures: OomFigures) -> bool:
    """Return True if these bytes are what is missing, and not little."""
    size = min(size, float(figures.allocated))
    return size >= max(figures.missing, MIN_FRACTION * figures.limit)


def _earlier(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    held = record.earlier or 0
    if not _explains(held, figures):
        return None
    text = (
        f"An optimizer from before the present one was made, with its parameters, gradients and "
        f"state, still holds {format_bytes(held)}; {format_bytes(figures.requested)} more did not "
        "fit."
    )
    return _Conclusion(OomCause.EARLIER, text, plans.EARLIER)


def _fragmentation(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return fragmentation if only the place of free memory can have refused the allocation.

    In a step of a kind that was never completed free pieces prove nothing: the step frees and
    allocates more before it has its peak. The process must have held the demand before.
    """
    done = record.steps_done or 0
    is_first = done < FIRST_STEPS and (done > 0 or record.phase is not None)
    was_held = figures.demand <= (record.peak_allocated or 0)
    is_enough = figures.cached >= max(MIN_FRAGMENTED * figures.reserved, figures.missing)
    if is_first or not was_held or not is_enough:
        return None
    percent = 100 * figures.cached / figures.reserved
    text = (
        f"{format_bytes(figures.requested)} was requested, and {format_bytes(figures.cached)} of "
        f"the reserved memory was free ({percent:.0f}%), but not in one block that this "
        "allocation may use."
    )
    return _Conclusion(OomCause.FRAGMENTATION, text, plans.FRAGMENTATION)


def _others(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return "another process" if the request would fit without the other processes."""
    others = record.others or 0
    enough = max(figures.missing, MIN_FRACTION * figures.limit)
    # At this process's own limit the end of others would change nothing.
    if figures.limit - figures.reserved < figures.requested or others < enough:
        return None
    text = (
        f"{record.holders} held {format_bytes(others)} of the GPU's "
        f"{format_bytes(record.total or figures.limit)}; without that, "
        f"{format_bytes(figures.requested)} would have fit."
    )
    return _Conclusion(OomCause.OTHER_PROCESS, text, plans.OTHER_PROCESS)


def _too_large(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return "too large" if the figures exclude everything else, also unknown processes."""
    hidden = figures.outside if _is_hidden(record, figures) else 0
    if figures.requested <= min(figures.available + hidden, figures.limit):
        return None
    cause = OomCause.TOO_LARGE
    requested = format_bytes(figures.requested)
    done = record.steps_done or 0
    has = f"the GPU has {format_bytes(figures.limit)}"
    if record.total is not None and figures.limit < record.total:
        has = f"this process may use {format_bytes(figures.limit)} of the GPU"
    if figures.requested > figures.limit:
        text = f"A single tensor of {requested} was requested: {has}."
    elif record.phase == "optimizer" and (done == 0 or _creates_state(record)):
        when = "its state in its first step"
        if done:
            # What was allocated until then has fit: a smaller model is not the first answer.
            cause = OomCause.OPTIMIZER_STATE
            when = f"new state in step {done + 1:,}"
        text = (
            f"The optimizer creates {when}, and {requested} of that did not fit next to "
            f"{format_bytes(figures.allocated)} allocated: {has}."
        )
    elif done < FIRST_STEPS:
        text = (
            f"{format_bytes(figures.allocated)} was in use before step {done + 1} was complete, "
            f"and {requested} more was requested: {has}."
        )
    elif record.peak_allocated is not None and 0 < record.peak_allocated < figures.demand:
        text = (
            f"Up to {format_bytes(record.peak_allocated)} was in use before, and now at least "
            f"{format_bytes(figures.demand)} is needed: {has}."
        )
    else:
        return None
    plan = plans.OPTIMIZER if record.phase == "optimizer" else plans.TOO_LARGE
    return _Conclusion(cause, text, plan)


def _creates_state(record: OomRecord) -> bool:
    """Return True if the stack is within the part of an optimizer that creates state."""
    return any(frame.endswith(STATE_FUNCTIONS) for frame in record.stack)


def _is_hidden(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if much of the device is held outside torch, by unknown processes."""
    return record.others is None and figures.outside >= MAX_UNKNOWN * figures.limit


def _unknown(record: OomRecord, figures: OomFigures) -> _Conclusion:
    requested = format_bytes(figures.requested)
    if _is_hidden(record, figures):
        reason = record.others_reason or "the driver does not list processes"
        text = (
            f"{format_bytes(figures.outside)} of the GPU is held outside of PyTorch's memory, by "
            f"other processes or by libraries of this one ({reason.rstrip('.')})."
        )
    elif figures.missing <= 0:
        text = (
            f"{requested} was refused although {format_bytes(figures.available)} was free a moment "
            "later: the driver's memory may be fragmented, or another process was faster."
        )
    else:
        text = (
            f"{requested} more did not fit next to {format_bytes(figures.allocated)}; no single "
            "cause explains it."
        )
    return _Conclusion(OomCause.UNKNOWN, text, plans.TOO_LARGE)


def _host_cause(record: OomRecord) -> _Conclusion:
    host = record.host or HostMemory()
    if record.memory is MemoryKind.PINNED:
        text = "The host could not pin more memory; GPU memory was not the limit."
        return _Conclusion(OomCause.HOST, text, plans.PINNED)
    if host.kills:
        killed = "a process" if host.kills == 1 else f"{host.kills} processes"
        text = f"The kernel killed {killed} because this machine or container was out of memory."
        return _Conclusion(OomCause.HOST, text, plans.HOST)
    text = "The host ran out of memory"
    if record.requested is not None:
        text += f" for {format_bytes(record.requested)}"
    if host.available is not None and host.total is not None:
        text += f": {format_bytes(host.available)} of {format_bytes(host.total)} was available"
    return _Conclusion(OomCause.HOST, f"{text}.", plans.HOST)


MAX_SILENCE_S = 300.0  # Maximum age of a heartbeat: later kills may be another process's.


@dataclass(frozen=True, slots=True)
class OomAnalysis:
    """A run's report with the finding about its last failed allocation."""

    report: OomReport
    finding: OomFinding

    @property
    def sentence(self) -> str:
        """The cause and its evidence, in one line."""
        return f"{self.finding.cause}: {self.finding.text}"


def diagnose_run(run: RunInfo, rank: int = 0, allowed: Allowed | None = None) -> OomAnalysis | None:
    """Return the analysis of a rank's failed allocations; None without failures.

    Raises OSError, and ValueError with the name of a malformed file.
    """
    report = read_report(run.folder, rank) or _killed(run)
    if report is None:
        return None
    return OomAnalysis(report, diagnose(report.last, setup_of(run.run_json), allowed=allowed))


def _killed(run: RunInfo) -> OomReport | None:
    """Return a report for a crashed run of this host if the kernel killed a process, or None."""
    run_json, beat = run.run_json, run.run_json.get("heartbeat")
    if run.status is not RunStatus.CRASHED or run_json.get("host") != socket.gethostname():
        return None
    if not isinstance(beat, int | float) or not 0 <= time.time() - beat <= MAX_SILENCE_S:
        return None
    kills, step = kills_since(run_json.get("oom_kills")), run_json.get("step")
    if not kills:
        return None
    record = OomRecord(
        ts=float(beat),
        memory=MemoryKind.HOST,
        step=step if type(step) is int else 0,
        host=HostMemory(kills=kills),
    )
    return OomReport(last=record, ended=True)
