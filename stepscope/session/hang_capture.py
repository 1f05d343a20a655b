"""What can be read of a rank that makes no step, without waiting for its training thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from stepscope.diagnosis.hang import COMPILING
from stepscope.diagnosis.hang_record import KEPT, Entered, HangRecord
from stepscope.diagnosis.ras import parse
from stepscope.sampling import flight_recorder, nccl_ras, process_groups
from stepscope.sampling.flight_recorder import Collective, FlightRecord
from stepscope.sampling.graph_capture import captures_anywhere
from stepscope.session.hang_stack import doing_of, frames_of, kept, phase_of

log = logging.getLogger(__name__)

PENDING = 64
"""Collectives that are kept although they are not over: the oldest ones."""
RANKS_LIMIT = 1024
"""Ranks that are kept of a group."""


def capture(known: HangRecord, thread: int) -> HangRecord:
    """Return the record with what is so now; `thread` is the number of the training thread."""
    frames = frames_of(thread)
    record = replace(
        known,
        seen=time.time(),
        frames=kept(frames),
        phase=phase_of(frames),
        doing=doing_of(frames),
    )
    if record.doing == COMPILING:
        # Compiling may capture a CUDA graph, which a look at NCCL's events would end.
        return replace(record, collectives_reason="the training thread compiles")
    try:
        if captures_anywhere():
            return replace(record, collectives_reason="a CUDA graph is being captured")
        told = flight_recorder.dump()
    except Exception as error:  # noqa: BLE001 - a private function of torch may raise anything
        return replace(record, collectives_reason=f"the Flight Recorder failed ({error})"[:200])
    if told is None:
        return replace(record, collectives_reason="torch has no Flight Recorder here")
    groups = {**told.groups, **process_groups.groups()}
    return replace(
        record,
        collectives=tuple(map(_entered, newest(told))),
        groups={name: ranks[:RANKS_LIMIT] for name, ranks in groups.items() if ranks},
        collectives_reason=None if told.collectives else "the Flight Recorder is empty",
    )


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


def with_ras(record: HangRecord) -> HangRecord:
    """Return the record with what NCCL's RAS says: asked by one rank a host, where NCCL is used."""
    first_here = os.environ.get("LOCAL_RANK", str(record.number)) == "0"
    where = nccl_ras.address()
    if not first_here or where is None or not process_groups.uses_nccl():
        return record
    try:
        return replace(record, ras=parse(nccl_ras.ask(where)), ras_reason=None)
    except (nccl_ras.RasError, ValueError) as error:
        return replace(record, ras_reason=f"NCCL RAS: {error}"[:200])


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
