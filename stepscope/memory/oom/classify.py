"""Why memory ran out, in one verdict with the figures that prove it. Pure: a record in, words out.

Before torch gives up it returns every segment that is wholly free to the driver. So what is still
reserved and not allocated lies in pieces between tensors, and for a request R these hold:

    R > room                        why it failed; room is what the driver could still give
    R <= room + cached              fragmentation, if the process has held that much before
    R <= room + cached + others     without the other processes it would fit
    else                            the training itself needs more than there is

In a step that was never completed free pieces prove nothing, as its peak is still to come: they are
a remark that follows "too big". A whole free block of another stream or pool proves it at any time.

For the last line the steps before tell what is new: a trend, a single step that needed far more, or
nothing, where the first step was never completed. Where no line holds, or the figures are missing,
no case is named and the verdict says what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.bottleneck.recommendations import Setup
from stepscope.memory.oom.evidence import Evidence, figures_of, gpu_evidence, host_evidence
from stepscope.memory.oom.oom_cases import Case, gpu_case, host_case, pieces_remark
from stepscope.memory.oom.oom_history import trend
from stepscope.memory.oom.recommendations import Allowed, Step, steps_to_take
from stepscope.memory.oom.record import Memory, OomRecord, OomReport, oom_name, parse

__all__ = [
    "Case",
    "Evidence",
    "OomRecord",
    "OomReport",
    "OomVerdict",
    "judge",
    "oom_name",
    "parse",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OomVerdict:
    """One sentence on why memory ran out, what proves it and what to do, the best first.

    `share` is the part of the device's memory that the case is about, None where it is about all
    of it or no case is named.
    """

    case: Case
    text: str
    evidence: tuple[Evidence, ...] = ()
    next: tuple[Step, ...] = ()
    share: float | None = None


def judge(
    record: OomRecord,
    setup: Setup | None = None,
    *,
    growth: Mapping[str, Any] | None = None,
    allowed: Allowed | None = None,
) -> OomVerdict:
    """Name the case of a failed allocation, or abstain.

    `setup` is what the run was started with: for a run of ours the next steps are settings.
    `growth` is the data of the run's last `memory_growth` event. `allowed(field, value)` says
    whether a setting is possible on this machine.
    """
    remark = None
    if record.memory is not Memory.GPU:
        case, text, share, advice = host_case(record)
        evidence = host_evidence(record)
    else:
        figures = figures_of(record)
        found = trend(record, growth)
        case, text, share, advice = gpu_case(record, figures, found)
        evidence = gpu_evidence(record, figures, found)
        remark = pieces_remark(record, figures, case)
    take = steps_to_take(advice, record, setup, allowed, has_pieces=remark is not None)
    return OomVerdict(
        case=case,
        text=text if remark is None else f"{text} {remark}",
        evidence=evidence,
        next=take,
        share=None if share is None else round(min(1.0, max(0.0, share)), 4),
    )
