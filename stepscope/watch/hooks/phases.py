"""The phases of a step: forward, backward and the optimizer, and what DDP knows of its backward.

Only in a job of several processes, where they tell who is slow: docs/stragglers.md. Nothing more is
wrapped for them but the making of a DistributedDataParallel. The begins and ends are seen where the
other captures stand: a batch arrives (`data.py`), backward() is called (`loss.py`), the optimizer
has stepped (`optimizer.py`).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTimes
from stepscope.watch.hooks.patching import Function, Guard, Patches

if TYPE_CHECKING:
    from stepscope.watch.hooks.state import State


class Phases:
    """Adds up a step's phases between its batches; used by the training thread alone.

    `mark_s` is the end of what came last: a batch, a backward() or a step. What lies between a step
    and the batch after it belongs to no phase.
    """

    __slots__ = ("_backward_s", "_ddp", "_forward_s", "_guard", "mark_s")

    def __init__(self) -> None:
        self.mark_s = 0.0
        self._forward_s = self._backward_s = 0.0
        self._ddp = DdpTimes()
        self._guard = Guard(DDP_METRICS)

    def backward(self, began_s: float, ended_s: float) -> None:
        """A call of backward()."""
        if self.mark_s:
            self._forward_s += began_s - self.mark_s
        self._backward_s += ended_s - began_s
        self.mark_s = ended_s

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Add the phases of the step that ended now."""
        if self._backward_s:
            row["perf/forward"] = self._forward_s
            row["perf/backward"] = self._backward_s
            row["perf/optimizer"] = now_s - self.mark_s
        self._guard.call(self._ddp.add, row, now_s)
        self.mark_s, self._forward_s, self._backward_s = now_s, 0.0, 0.0

    def around_making(self, original: Function) -> Function:
        """Wrap `DistributedDataParallel.__init__`."""

        # By position only: Lightning gives the model by its name, `module`.
        def __init__(ddp: Any, /, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            self._guard.call(self._ddp.meet, ddp)

        return __init__


def attach(torch: ModuleType, state: State, patches: Patches) -> None:
    """Take the times from now on, in a job of several processes."""
    if state.session.world_size < 2:
        return
    state.phases = phases = Phases()
    owner = torch.nn.parallel.DistributedDataParallel
    patches.replace(owner, "__init__", phases.around_making, traced=False)
