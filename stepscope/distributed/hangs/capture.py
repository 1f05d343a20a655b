"""What can be read of a rank that makes no step, without waiting for its training thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from stepscope.common.clock import clock
from stepscope.distributed import flight_recorder, process_groups
from stepscope.distributed.debug_pipe import NcclRecord
from stepscope.distributed.flight_recorder import Collective, FlightRecord
from stepscope.distributed.hangs.diagnose import COMPILING
from stepscope.distributed.hangs.hang_stack import doing_of, frames_of, kept, phase_of
from stepscope.distributed.hangs.job_state import Blocked, collective_words
from stepscope.distributed.hangs.record import KEPT, Entered, HangRecord

log = logging.getLogger(__name__)

PENDING = 64
"""Collectives that are kept although they are not over: the oldest ones."""
RANKS_LIMIT = 1024
"""Ranks that are kept of a group."""

_nccl = NcclRecord()


def capture(known: HangRecord, thread: int) -> HangRecord:
    """Return the record with what is so now; `thread` is the number of the training thread."""
    frames = frames_of(thread)
    record = replace(
        known,
        seen=clock.now(),
        frames=kept(frames),
        phase=phase_of(frames),
        doing=doing_of(frames),
    )
    if record.doing == COMPILING:
        # Compiling may capture a CUDA graph, which a look at NCCL's events would end.
        return replace(record, collectives_reason="the training thread compiles")
    try:
        told = _recorded(record.rank)
    except Exception as error:  # noqa: BLE001 - a private function of torch may raise anything
        told = f"the Flight Recorder failed ({error})"[:200]
    if isinstance(told, str):
        return replace(record, collectives=(), collectives_reason=told)
    groups = {**told.groups, **process_groups.groups()}
    return replace(
        record,
        collectives=tuple(map(_entered, newest(told))),
        groups={name: ranks[:RANKS_LIMIT] for name, ranks in groups.items() if ranks},
        collectives_reason=None if told.collectives else "the Flight Recorder is empty",
    )


def _recorded(rank: int) -> FlightRecord | str:
    """Return the collectives of this process without a call of CUDA, or why there are none.

    The recorder of gloo and others holds no CUDA events: its dump cannot wait for a driver.
    """
    if process_groups.uses_nccl():
        return _nccl.look(rank)
    return flight_recorder.dump() or "torch has no Flight Recorder here"


def failed_in(rank: int) -> str | None:
    """Return the collective that fails now for want of another rank, in words; None if unknown.

    The oldest that is not over, else the newest: gloo ends a collective that fails.
    """
    try:
        told = _recorded(rank)
    except Exception:  # noqa: BLE001 - as above
        return None
    if isinstance(told, str) or not told.collectives:
        return None
    one = next((one for one in told.collectives if not one.done), told.collectives[-1])
    if one.sequence is None:
        return one.operation
    return collective_words(Blocked(one.group, one.sequence, {}, (), ()), _entered(one))


def newest(told: FlightRecord) -> Sequence[Collective]:
    """Return what is not over, the oldest first, and the newest of each group."""
    pending = [one for one in told.collectives if not one.done][:PENDING]
    chosen = {id(one) for one in pending}
    counts: dict[str, int] = {}
    for one in reversed(told.collectives):
        if counts.setdefault(one.group, 0) < KEPT:
            counts[one.group] += 1
            chosen.add(id(one))
    return [one for one in told.collectives if id(one) in chosen]


def _entered(one: Collective) -> Entered:
    return Entered(
        group=one.group,
        operation=one.operation,
        sequence=one.sequence,
        sizes=one.sizes,
        input_bytes=one.input_bytes,
        created_s=one.created_s,
        state=one.state,
        done=one.done,
    )
