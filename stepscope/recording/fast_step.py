"""The shortest way from `rec.step(loss=…, lr=…)` into the ring: a function made for these names.

A function that takes any keyword arguments has to build a dict of them, look its layout up, check
and unpack every value: 1.1 to 1.9 us for four metrics. With the names written into its signature,
as `dataclasses` writes `__init__`, the same takes half (`benchmarks/recorder.py`).
"""

from __future__ import annotations

import keyword
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.recording.ring import HEADER_BYTES, SLOT_BYTES, SLOTS, WIDTH

if TYPE_CHECKING:
    from stepscope.recording.recorder import Recorder
    from stepscope.recording.ring import Layout

Step = Callable[..., None]

# Our own names begin with an underscore, names of metrics do not (`can_be_compiled`). The gate is
# shut whenever a row has to take the long way: full, closed, forked, a command or a tensor waiting.
_SOURCE = """
def step(_values=None, /, *, {parameters}, **_more):
    if _ring.last >= _ring.gate or _more or _values is not None or {unusual}:
        return _long_way(_values, {arguments}, **_more)
    {read}
    _ring.last = _number = _claim()
    _recorder.step = _step = _recorder.step + 1
    _pack(_memory, _number % _SLOTS * _SLOT_BYTES + _HEADER_BYTES, _layout, _clock(), _step,
          {numbers}, _number + 1)
"""
_READ = """
    try:
        {reads}
    except _Errors:
        return _long_way(_values, {arguments}, **_more)
"""


class Absent:
    """Default of a metric that this step does not give."""


ABSENT = Absent()


def can_be_compiled(names: Sequence[str]) -> bool:
    """Say whether these can be names of parameters that hide none of ours."""
    return 0 < len(names) <= WIDTH and all(
        name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        for name in names
    )


def compile_step(
    names: Sequence[str],
    tensors: Collection[str],
    layout: Layout,
    recorder: Recorder,
    long_way: Step,
) -> Step:
    """Return a `step` for exactly these names; anything else it is given goes the long way.

    Values are floats; those of the names `tensors` are tensors of one element on the CPU.
    """
    arguments = ", ".join(f"{name}={name}" for name in names)
    reads = "; ".join(f"_n_{name} = _float({name}.item())" for name in names if name in tensors)
    source = _SOURCE.format(
        parameters=", ".join(f"{name}=_ABSENT" for name in names),
        unusual=" or ".join(_unusual(name, name in tensors) for name in names),
        arguments=arguments,
        read=_READ.format(reads=reads, arguments=arguments).strip() if reads else "",
        numbers=", ".join(f"_n_{name}" if name in tensors else name for name in names),
    )
    scope: dict[str, Any] = {
        "_ring": recorder.ring,
        "_recorder": recorder,
        "_claim": recorder.ring.claim,
        "_pack": layout.pack,
        "_memory": recorder.ring.memory,
        "_layout": layout.number,
        "_clock": time.time,
        "_long_way": long_way,
        "_ABSENT": ABSENT,
        "_SLOTS": SLOTS,
        "_SLOT_BYTES": SLOT_BYTES,
        "_HEADER_BYTES": HEADER_BYTES,
        "_float": float,
        "_type": type,
        "_Errors": (TypeError, ValueError, RuntimeError),
        "_Tensor": getattr(sys.modules.get("torch"), "Tensor", None),
    }
    exec(source, scope)
    step: Step = scope["step"]
    return step


def is_host_tensor(value: Any) -> bool:
    """Say whether this is a plain torch tensor whose value can be read without waiting."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor and value.is_cpu


def _unusual(name: str, tensor: bool) -> str:
    if tensor:
        return f"_type({name}) is not _Tensor or not {name}.is_cpu"
    return f"_type({name}) is not _float"
