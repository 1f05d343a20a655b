"""What a command on memory did, in words: the text of its event, stored with its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.commands.command import Command, CommandName
from stepscope.common.formatting import format_bytes

Bytes = Mapping[str, float]  # by metric key


def empty_cache(before: Bytes, after: Bytes) -> str:
    """Say what emptying the cache gave back, and what it could not."""
    if "memory/reserved" not in after:
        return (
            "Empty cache: a CPU run has no CUDA cache to empty; "
            f"process memory {_change(before, after, 'process/rss')}"
        )
    text = f"Empty cache: reserved {_change(before, after, 'memory/reserved')}"
    left = after["memory/reserved"]
    if left == 0:
        return f"{text}; nothing stays"
    held = after["memory/allocated"]
    # torch counts as allocated what it gives to cuBLAS, too: 32 MiB on an H100.
    text += (
        f"; {format_bytes(left)} stay: {format_bytes(held)} held by tensors and library workspaces"
    )
    if left > held:
        text += f", {format_bytes(left - held)} free parts of blocks in use (fragmentation)"
    return text


def reset_peaks(before: Bytes, after: Bytes) -> str:
    """Say what the peaks were and are."""
    if "memory/peak_allocated" not in after:
        return f"Reset peak stats: peak process memory {_change(before, after, 'process/peak_rss')}"
    return (
        f"Reset peak stats: peak allocated {_change(before, after, 'memory/peak_allocated')}, "
        f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
    )


def collect_garbage(objects: int, before: Bytes, after: Bytes) -> str:
    """Say how many objects were freed, and what memory with them."""
    on_gpu = "memory/allocated" in after
    word, key = ("allocated", "memory/allocated") if on_gpu else ("process memory", "process/rss")
    return f"Collect garbage: {objects:,} objects freed; {word} {_change(before, after, key)}"


def memory_snapshot(name: str, size: int, first: int, last: int) -> str:
    """Say which steps a snapshot file covers; `last` is before `first` where no step has ended."""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if last < first:
        steps = f"step {first}, which the run did not end"
    return f"Memory snapshot: {name}, {format_bytes(size)}, all allocations of {steps}"


def combined(command: Command, results: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Say what a command did on all ranks, from the bytes `before` and `after` on each.

    None where the ranks' own words say more: on a CPU, and of what is not about memory.

    >>> one = {"before": {"memory/reserved": 3 * 2**20}, "after": {"memory/reserved": 2**20}}
    >>> two = {"before": {"memory/reserved": 7 * 2**20}, "after": {"memory/reserved": 2**20}}
    >>> combined(Command(1, CommandName.EMPTY_CACHE, {}), {0: one, 1: two})
    'Empty cache: 2 ranks gave back 8.0 MiB in all, rank 1 most with 6.0 MiB'
    """
    if command.name not in _LESS:
        return None
    words, key = _LESS[command.name]
    less = {
        rank: one["before"].get(key, 0) - one["after"][key]
        for rank, one in results.items()
        if key in one.get("after", {})
    }
    if len(less) < 2:
        return None
    most = max(less, key=lambda rank: less[rank])
    if less[most] <= 0:
        return words.format(f"{len(less)} ranks", "nothing")
    total = format_bytes(sum(max(0, freed) for freed in less.values()))
    amount = f"{total} in all, rank {most} most with {format_bytes(less[most])}"
    return words.format(f"{len(less)} ranks", amount)


_LESS = {
    CommandName.EMPTY_CACHE: ("Empty cache: {} gave back {}", "memory/reserved"),
    CommandName.COLLECT_GARBAGE: ("Collect garbage: {} freed {}", "memory/allocated"),
    CommandName.RESET_PEAKS: (
        "Reset peak stats: on {} the peak allocated is lower by {}",
        "memory/peak_allocated",
    ),
}


def _change(before: Bytes, after: Bytes, key: str) -> str:
    return f"{format_bytes(before.get(key, 0))} → {format_bytes(after[key])}"


def profile(
    first: int,
    last: int,
    *,
    slower: float | None,
    held_s: float,
    early: str | None,
    size: int | None,
) -> str:
    """Say which steps a profile has, what it cost them, and how large its trace is.

    `slower` is how much longer a profiled step took, as a fraction of one before; `held_s` is the
    time for which training stood still; `early` tells why it has fewer steps than were asked for.
    """
    text = f"Profile: step {first}" if first == last else f"Profile: steps {first} to {last}"
    if slower is not None:
        percent = round(100 * slower)
        text += f", {percent} % slower than before" if percent > 0 else ", no slower than before"
    text += f"; training stood still for {held_s:.2f} s"
    if early is not None:
        text += f"; it ended early: {early}"
    return text if size is None else f"{text}; trace of {format_bytes(size)}"
