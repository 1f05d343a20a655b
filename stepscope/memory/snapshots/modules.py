"""Live memory by the module that allocated it; pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stepscope.memory.snapshots.summary import Summary


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Live bytes of all stacks that name one module; None for those that name none."""

    module: str | None
    size: int
    count: int


def by_module(summary: Summary, device: int | None = None) -> tuple[ModuleMemory, ...]:
    """Return the live bytes by module, the largest first; without a device of all together."""
    sums: defaultdict[str | None, list[int]] = defaultdict(lambda: [0, 0])
    for site in summary.sites:
        if device is not None and site.device != device:
            continue
        found = sums[summary.module(site.stack)]
        found[0] += site.size
        found[1] += site.count
    made = [ModuleMemory(module, *numbers) for module, numbers in sums.items()]
    return tuple(sorted(made, key=lambda one: (-one.size, one.module or "")))
