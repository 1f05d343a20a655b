"""The figures of a failed allocation: what a judgement needs, and what is shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.common.formatting import format_bytes
from stepscope.memory.oom.oom_history import Trend, usual_peak
from stepscope.memory.oom.record import OomRecord

OUTSIDE = 0.25
"""Share of the device held outside torch, by nobody knows whom, from which no case is named: a
context and its libraries take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A figure that the verdict rests on: bytes, or a text where it is none."""

    name: str
    size: float | None = None
    text: str | None = None

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return self.text if self.text is not None else format_bytes(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a record that all have to be there for a judgement; bytes.

    `limit` is what this process may use of the device, `room` what the driver could still give it,
    `cached` what torch keeps in pieces, `outside` what is used and is not torch's of this process.
    """

    requested: int
    limit: int
    room: int
    allocated: int
    reserved: int
    outside: int

    @property
    def cached(self) -> int:
        """Reserved and not allocated."""
        return max(0, self.reserved - self.allocated)

    @property
    def demand(self) -> int:
        """What would have been allocated."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> Figures | None:
    """Return the figures of a record; None where one is missing, or they contradict each other."""
    needed = (record.requested, record.free, record.allocated, record.reserved)
    limit = record.allowed or record.total
    if limit is None or limit <= 0 or any(part is None or part < 0 for part in needed):
        return None
    requested, free, allocated, reserved = (int(part or 0) for part in needed)
    if requested == 0 or allocated > reserved:
        return None
    total = record.total or limit
    room = free if limit >= total else min(free, max(0, limit - reserved))
    outside = max(0, total - free - reserved)
    return Figures(
        requested=requested,
        limit=limit,
        room=room,
        allocated=allocated,
        reserved=reserved,
        outside=outside,
    )


def others_of(record: OomRecord, figures: Figures) -> int | None:
    """Return the memory of other processes; None where nobody tells it from our own."""
    listed = [one.memory for one in record.processes if one.memory is not None]
    if record.others is not None:
        return max(record.others, 0)
    if listed:
        return sum(listed)
    if record.own is not None and record.total is not None and record.free is not None:
        return max(0, record.total - record.free - max(record.own, figures.reserved))
    return None


def evaluates_with_gradients(record: OomRecord) -> bool:
    """Say whether a validation ran with gradients on, as without `torch.no_grad()`.

    Evaluation mode alone does not tell: it has to be another mode than steps ended in.
    """
    changed = record.training is False and record.training_at_steps is True
    return record.grad is True and record.phase == "validation" and changed


def gpu_evidence(
    record: OomRecord, figures: Figures | None, found: Trend | None
) -> tuple[Evidence, ...]:
    usual = usual_peak(record)
    segments, state = record.segments, record.optimizer
    sizes = [
        ("Asked for", record.requested),
        ("Allocated (tensors)", record.allocated),
        ("Reserved and free, in pieces", None if figures is None else figures.cached),
        ("Largest free piece", None if segments is None else segments.largest_free),
        ("Largest free piece of other streams and pools", segments.elsewhere if segments else None),
        ("Free on the device", record.free),
        ("Other processes", None if figures is None else others_of(record, figures)),
        ("Outside of PyTorch's memory", None if figures is None else figures.outside),
        ("Allowed to this process", record.allowed),
        ("Device in all", record.total),
        ("Peak of the steps before", usual),
        ("Parameters", None if state is None else state.parameters),
        ("Optimizer state, there", None if state is None else state.state),
        ("Optimizer state, whole", None if state is None else state.expected),
    ]
    told = [Evidence(name=name, size=size) for name, size in sizes if size is not None]
    if record.others is None and record.others_reason:
        told.append(Evidence(name="Other processes", text=f"not known: {record.others_reason}"))
    if found is not None:
        grown = f"{format_bytes(found.per_step)} a step over {found.steps:,} steps"
        told.append(Evidence(name="Growth of allocated", text=grown))
    return (*told, *_circumstances(record))


def _circumstances(record: OomRecord) -> tuple[Evidence, ...]:
    modes = {True: "training", False: "evaluation", None: None}
    grads = {True: "on", False: "off", None: None}
    words = [
        ("Part of the step", record.phase),
        ("Mode of the model", modes[record.training]),
        ("Gradients", grads[record.grad]),
        ("Input of the model", ", ".join(record.inputs) or None),
        ("Steps completed", None if record.steps_done is None else f"{record.steps_done:,}"),
        ("Allocator settings", record.settings.text or None),
        ("Retries before", None if not record.retries else f"{record.retries:,}"),
    ]
    return tuple(Evidence(name=name, text=text) for name, text in words if text is not None)


def host_evidence(record: OomRecord) -> tuple[Evidence, ...]:
    host = record.host
    sizes = [("Asked for", record.requested)]
    if host is not None:
        sizes += [
            ("Host, available", host.available),
            ("Host in all", host.total),
            ("This process", host.process),
            ("Its child processes", host.children),
            ("Container, used", host.limit_used),
            ("Container, limit", host.limit),
            ("Shared memory, free", host.shared_free),
        ]
    told = [Evidence(name=name, size=size) for name, size in sizes if size is not None]
    if host is not None and host.kills is not None:
        told.append(Evidence(name="Processes ended by the kernel", text=f"{host.kills:,}"))
    return (*told, *_circumstances(record))
