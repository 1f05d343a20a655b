"""Summarize torch's `key_averages()` of a profile; write and parse the untrusted summary file."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from stepscope.common.formatting import printable

MAX_OPERATORS = 300  # The others are counted in `operators_left`.
MAX_NAME_CHARS = 200  # C++ names of kernels have thousands.
MAX_BYTES = 2**20  # A summary with all operators has 200 kB.

Time = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
Bytes = Annotated[int, msgspec.Meta(ge=-(2**60), le=2**60)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


class OperatorKind(StrEnum):
    """What a row of `key_averages()` stands for."""

    OPERATOR = "operator"  # Of PyTorch or autograd, or a call of the CUDA runtime.
    RANGE = "range"  # A named part of the step: `record_function`, an optimizer, a loader.
    KERNEL = "kernel"  # On the device, with the time that its operator has, too.


class OperatorStats(msgspec.Struct):
    """All calls of one name; times in microseconds, memory in bytes.

    "Self" excludes the operators within it, and so does memory: allocated less freed bytes, which
    may be negative.
    """

    name: str
    kind: OperatorKind
    calls: Count
    cpu_self_us: Time
    cpu_total_us: Time
    cuda_self_us: Time
    cuda_total_us: Time
    cpu_memory: Bytes
    cuda_memory: Bytes


class ProfileSummary(msgspec.Struct, tag_field="schema", tag=2):
    """Summary of the steps `first` to `last`; without `cuda` no kernels were recorded."""

    first: Count
    last: Count
    cuda: bool
    operators: Annotated[list[OperatorStats], msgspec.Meta(max_length=MAX_OPERATORS)]
    operators_left: Count


def summarize(averages: Iterable[Any], *, first: int, last: int) -> ProfileSummary:
    """Return the summary of the rows of `key_averages()`, the most self time first."""
    operators = [_operator(row) for row in averages if not _is_range_of_device(row)]
    operators.sort(key=lambda operator: -(operator.cpu_self_us + operator.cuda_self_us))
    return ProfileSummary(
        first=first,
        last=last,
        cuda=any(operator.cuda_self_us > 0 for operator in operators),
        operators=operators[:MAX_OPERATORS],
        operators_left=len(operators[MAX_OPERATORS:]),
    )


def _is_range_of_device(row: Any) -> bool:
    """Return True for a range's copy on the device's timeline, whose time its kernels have."""
    return _is_range(row) and not _is_on_cpu(row)


def _is_range(row: Any) -> bool:
    # Older versions of torch do not mark ranges: there they count as operators.
    return bool(getattr(row, "is_user_annotation", False))


def _is_on_cpu(row: Any) -> bool:
    return bool(row.device_type.name == "CPU")


def _kind(row: Any) -> OperatorKind:
    if not _is_on_cpu(row):
        return OperatorKind.KERNEL
    return OperatorKind.RANGE if _is_range(row) else OperatorKind.OPERATOR


def _operator(row: Any) -> OperatorStats:
    return OperatorStats(
        name=row.key[:MAX_NAME_CHARS],
        kind=_kind(row),
        calls=row.count,
        cpu_self_us=round(row.self_cpu_time_total, 1),
        cpu_total_us=round(row.cpu_time_total, 1),
        cuda_self_us=round(row.self_device_time_total, 1),
        cuda_total_us=round(row.device_time_total, 1),
        cpu_memory=row.self_cpu_memory_usage,
        cuda_memory=row.self_device_memory_usage,
    )


def to_json(summary: ProfileSummary) -> bytes:
    """Return the content of a summary file."""
    return msgspec.json.encode(summary)


def parse(content: bytes) -> ProfileSummary:
    """Return an untrusted summary. Raises ValueError with a sentence if it is malformed."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes, got {len(content)}")
    try:
        summary = msgspec.json.decode(content, type=ProfileSummary)
    except msgspec.ValidationError as error:
        raise ValueError(f"must be the summary of a profile: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({type(error).__name__})") from None
    for operator in summary.operators:
        operator.name = printable(operator.name[:MAX_NAME_CHARS])
    return summary
