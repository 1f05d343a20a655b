"""What is live in one snapshot and not in another, by stack; pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.memory.snapshots.summary import Summary


@dataclass(frozen=True, slots=True)
class Change:
    """Live bytes and blocks of one stack in both snapshots."""

    frames: tuple[str, ...]
    module: str | None
    before: int
    after: int
    count_before: int
    count_after: int

    @property
    def more(self) -> int:
        """Bytes that came, negative for bytes that went."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes from one snapshot to another, the largest first, all devices together."""

    changes: tuple[Change, ...]
    before: int
    """All live bytes."""
    after: int
    complete: bool
    """False where one of both has more stacks than are listed: theirs are not compared."""


def difference(first: Summary, second: Summary) -> Difference:
    """Return what is live in the second and not in the first, and the reverse.

    Blocks are compared by the stack that allocated them: addresses mean nothing across runs.
    """
    sums: dict[tuple[str, ...], list[int]] = {}
    modules: dict[tuple[str, ...], str | None] = {}
    for side, summary in enumerate((first, second)):
        for site in summary.sites:
            frames = summary.frames(site.stack)
            found = sums.setdefault(frames, [0, 0, 0, 0])
            found[side] += site.size
            found[2 + side] += site.count
            modules[frames] = summary.module(site.stack)
    changes = [Change(frames, modules[frames], *found) for frames, found in sums.items()]
    changed = [one for one in changes if one.more or one.count_before != one.count_after]
    return Difference(
        tuple(sorted(changed, key=lambda one: (-abs(one.more), one.frames))),
        live_bytes(first),
        live_bytes(second),
        complete=not first.sites_left and not second.sites_left,
    )


def live_bytes(summary: Summary) -> int:
    """Return the bytes of all live blocks."""
    return sum(site.size for site in summary.sites) + summary.size_left
