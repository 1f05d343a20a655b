"""Build the record of a failed allocation, of GPU or host memory.

It is built at the allocation itself, or else from its error. Each part is read separately: one that
fails is missing, and the record gives the reason.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psutil

from stepscope.common.clock import clock
from stepscope.common.json_values import to_text
from stepscope.gpu.source import nvml_uuid
from stepscope.host.usage import container, kills_since
from stepscope.memory import allocator
from stepscope.memory.oom import call_stack, device_state
from stepscope.memory.oom.device_state import DeviceMemoryUsers, holders
from stepscope.memory.oom.record import (
    AllocatorSettings,
    HostMemory,
    MemoryKind,
    OomAllocationSite,
    OomRecord,
    RecentSamples,
    bytes_in,
    figures_in,
)
from stepscope.metrics import Stream
from stepscope.recorder.recorder import Recorder
from stepscope.store.blocks import Sample


def host_memory(first_kills: Any = None) -> HostMemory:
    """Read it now; `first_kills` is what run.json has of the kernel's counter at the start."""
    memory, found = psutil.virtual_memory(), container()
    process = psutil.Process()
    return HostMemory(
        total=int(memory.total),
        available=int(memory.available),
        process=int(process.memory_info().rss),
        children=_children(process),
        limit=found.limit,
        limit_used=found.used,
        kills=kills_since(first_kills),
        shared_free=_shared_free(),
    )


def _children(process: psutil.Process) -> int | None:
    total = 0
    try:
        for child in process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
    except psutil.Error:
        return None
    return total


def _shared_free() -> int | None:
    """Return the free bytes of the shared memory that DataLoader's workers send batches through."""
    try:
        return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    except OSError:
        return None


WINDOW_S = 30.0
ROWS = 300
MESSAGE = 1500
_OF_PROCESS = (
    "memory/allocated",
    "memory/reserved",
    "memory/peak_allocated",
    "memory/inactive_split",
    "memory/alloc_retries",
    "memory/parameters",
    "memory/gradients",
    "memory/optimizer_state",
    "process/rss",
    "host/mem_used",
)
_OF_DEVICE = ("gpu/mem_used", "gpu/mem_others")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomContext:
    """What the run itself knows at a failure."""

    recorder: Recorder
    step: int
    steps_done: int
    own_parts: Mapping[str, str]
    mode_at_steps: Callable[[Any], bool | None] = lambda model: None
    first_kills: Any = None

    @property
    def base(self) -> OomRecord:
        """The record before anything is read."""
        return OomRecord(
            ts=clock.now(),
            step=self.step,
            epoch=self.recorder.epoch,
            steps_done=self.steps_done,
        )


class _Parts:
    """Reads one part after the other; `failed` names those that could not be read."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def read(self, what: str, default: T, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - of torch, NVML or the script's own objects
            self.failed.append(f"{what}: {type(error).__name__}: {to_text(error)[:100]}")
            return default

    @property
    def told(self) -> str | None:
        return "; ".join(self.failed) or None


def at_allocation(
    facts: OomContext, device: int, requested: int, allowed: int, free: int, whole: bool
) -> OomRecord:
    """Return the record of an allocation that fails now; without `whole` the cheap parts of it."""
    parts = _Parts()
    found: dict[str, Any] = parts.read("counters", {}, device_state.counters, device)
    record = replace(
        facts.base,
        device=device,
        requested=int(requested),
        allowed=int(allowed),
        free=int(free),
        total=parts.read("device", None, device_state.total_memory, device),
        settings=parts.read("settings", AllocatorSettings(), device_state.settings, device),
        uuid=parts.read("uuid", None, _uuid, device),
        **found,
    )
    record = _with_place(
        record,
        parts.read(
            "stack", call_stack.FailureSite(), call_stack.here, facts.own_parts, facts.mode_at_steps
        ),
    )
    if whole:
        record = _with_segments(record, parts)
        record = _with_others(record, facts, parts)
        record = replace(
            record,
            readings=parts.read("samples", RecentSamples(), readings, facts, record.uuid),
        )
    return replace(record, incomplete=parts.told)


def at_error(facts: OomContext, error: BaseException, memory: MemoryKind) -> OomRecord:
    """Return the record of a failure by its exception: the stack has unwound since."""
    parts = _Parts()
    said = to_text(error)
    record = replace(facts.base, memory=memory, message=first_words(error))
    place = parts.read(
        "stack",
        call_stack.FailureSite(),
        call_stack.of_traceback,
        error.__traceback__,
        facts.own_parts,
        facts.mode_at_steps,
    )
    record = _with_place(record, replace(place, is_script=False))
    if memory is MemoryKind.GPU:
        record = replace(record, **_of_message(said, parts))
        record = _with_others(record, facts, parts) if record.uuid else record
    else:
        record = replace(
            record,
            requested=bytes_in(said),
            host=parts.read("host", None, host_memory, facts.first_kills),
        )
    return replace(
        record,
        readings=parts.read("samples", RecentSamples(), readings, facts, record.uuid),
        incomplete=parts.told,
    )


def with_former(record: OomRecord, former: OomRecord) -> OomRecord:
    """Give a record without the slow parts those of the one before, moments ago."""
    return replace(
        record,
        own=former.own,
        others=former.others,
        others_reason=former.others_reason,
        processes=former.processes,
        readings=former.readings,
    )


def first_words(error: BaseException) -> str:
    """Return the beginning of an exception's text."""
    return to_text(error)[:MESSAGE]


def readings(facts: OomContext, uuid: str | None) -> RecentSamples:
    """Return the samples of the last WINDOW_S seconds that the recorder still has.

    A loop of ours is some steps ahead of the recorder, whose step the samples carry: they get the
    loop's, at the latest the one that was under way.
    """
    since, recorder = clock.now() - WINDOW_S, facts.recorder
    ahead = max(0, facts.step - recorder.step)
    rows = [row for row in list(recorder.recent) if row.ts >= since]
    own = [row for row in rows if row.stream == Stream.SAMPLES][-ROWS:]
    of_device = [row for row in rows if row.stream == Stream.DEVICES and row.source == uuid]
    columns = {key: tuple(_number(row.values.get(key)) for row in own) for key in _OF_PROCESS}
    columns |= {key: tuple(_latest(of_device, key, own)) for key in _OF_DEVICE}
    known = {key: values for key, values in columns.items() if any(v is not None for v in values)}
    return RecentSamples(
        ts=tuple(row.ts for row in own),
        steps=tuple(row.step + ahead for row in own),
        columns=known,
    )


def _latest(rows: list[Sample], key: str, at: list[Sample]) -> Iterable[float | None]:
    """Yield the newest value that was known at each row of `at`."""
    position, value = 0, None
    for row in at:
        while position < len(rows) and rows[position].ts <= row.ts:
            known = _number(rows[position].values.get(key))
            value = known if known is not None else value
            position += 1
        yield value


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _with_place(record: OomRecord, place: call_stack.FailureSite) -> OomRecord:
    return replace(
        record,
        phase=place.phase,
        training=place.training,
        training_at_steps=place.training_at_steps,
        function=place.function,
        inputs=place.inputs,
        optimizer=place.optimizer,
        stack=place.stack,
        grad=_gradients() if place.is_script else None,
    )


def _gradients() -> bool | None:
    torch = sys.modules.get("torch")
    return None if torch is None else bool(torch.is_grad_enabled())


def _with_segments(record: OomRecord, parts: _Parts) -> OomRecord:
    device = record.device
    if device is None:
        return record
    held = parts.read("blocks", 0, device_state.blocks_held, device)
    if held > device_state.MOST_BLOCKS:
        reason = f"the allocator holds {held:,} blocks, too many to list at such a moment"
        return replace(record, blocks_reason=reason)
    found: list[dict[str, Any]] = parts.read("segments", [], device_state.segments, device)
    stream = parts.read("stream", 0, device_state.stream_of, device)
    nothing: tuple[tuple[OomAllocationSite, ...], str | None] = (), None
    blocks, why = parts.read("blocks", nothing, device_state.live_blocks, found)
    return replace(
        record,
        segments=parts.read("free blocks", None, device_state.free_blocks, found, stream),
        blocks=blocks,
        blocks_reason=why,
    )


def _with_others(record: OomRecord, facts: OomContext, parts: _Parts) -> OomRecord:
    """Ask who else is on the device; where that is hidden, take the last sample of it."""
    if record.uuid is None:
        return record
    found = parts.read("processes", DeviceMemoryUsers(), holders, record.uuid)
    others = found.others
    if others is None:
        others = _recorded_others(facts, record.uuid)
    return replace(
        record,
        own=found.own,
        others=others,
        others_reason=found.reason if others is None else None,
        processes=found.processes,
    )


def _recorded_others(facts: OomContext, uuid: str) -> int | None:
    for row in reversed(list(facts.recorder.recent)):
        value = row.values.get("gpu/mem_others") if row.source == uuid else None
        if value is not None and math.isfinite(value):
            return int(value)
    return None


def _uuid(device: int) -> str:
    properties = sys.modules["torch"].cuda.get_device_properties(device)
    return nvml_uuid(str(properties.uuid), properties.name)


def _of_message(said: str, parts: _Parts) -> dict[str, Any]:
    """Return what torch's message says; of another library's error the counters as they are now."""
    found = figures_in(said)
    if allocator.reason() is not None:
        return found
    torch = sys.modules["torch"]
    device = parts.read("device", None, torch.cuda.current_device)
    if device is None:
        return found
    uuid = parts.read("uuid", None, _uuid, device)
    settings = parts.read("settings", AllocatorSettings(), device_state.settings, device)
    return {"device": device, "uuid": uuid, "settings": settings} | found
