"""The calls of `clip_grad_norm_` before a step, and their total norm.

Several calls, one a module, are parts of one norm; a call for parameters that were clipped before
takes the place of that one. A norm of parts of different kinds does not exist: it is None.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from stepscope.watch.hooks.parties import Parties, Reading, members

LIMIT = 1024
"""Calls before a step that are remembered."""

Clip = tuple[Reading, float, frozenset[int]]
"""The norm that was returned, its type, and the identities of the parameters: the parameters
themselves would live for as long as no step takes the norm."""


class Clips:
    """The calls of `clip_grad_norm_` since the last step."""

    def __init__(self) -> None:
        self._clips: list[Clip] = []
        self._seen: set[int] = set()
        """Identities of their parameters, from the second call on."""

    def __len__(self) -> int:
        return len(self._clips)

    def add(self, norm: Reading, kind: float, parameters: list[Any]) -> None:
        """Remember a call."""
        now = frozenset(map(id, parameters))
        if self._clips:
            self._seen = self._seen or set(self._clips[0][2])
            if not now.isdisjoint(self._seen):
                self._keep([clip for clip in self._clips if now.isdisjoint(clip[2])])
            self._seen |= now
        self._clips.append((norm, kind, now))
        del self._clips[:-LIMIT]

    def take(self, optimizer: Any, parties: Parties) -> Reading:
        """Return the total norm of what was clipped for this optimizer's step.

        A script that steps by hand has no optimizer: None.
        """
        taken, self._clips, self._seen = self._clips, [], set()
        if parties.are_several:
            mine = members(optimizer)
            left = [clip for clip in taken if mine.isdisjoint(clip[2])]
            taken = [clip for clip in taken if not mine.isdisjoint(clip[2])]
            self._keep(left)
        if len(taken) < 2:
            return taken[0][0] if taken else None
        return _total([clip[0] for clip in taken], {clip[1] for clip in taken})

    def _keep(self, clips: list[Clip]) -> None:
        self._clips = clips
        self._seen = set().union(*(clip[2] for clip in clips))


def _total(norms: list[Reading], kinds: set[float]) -> Reading:
    """The p-norm of p-norms is the p-norm of all; of different kinds there is none."""
    kind = kinds.pop()
    if kinds or kind <= 0 or any(norm is None for norm in norms):
        return None
    tensors = [norm for norm in norms if type(norm) is not float]
    if not tensors:
        return max(norms) if kind == math.inf else sum(norm**kind for norm in norms) ** (1 / kind)
    torch = import_module("torch")
    first = tensors[0].float()
    # Nothing here waits for a GPU: a number is filled in by a kernel, not copied.
    same = [
        first.new_full((), norm) if type(norm) is float else norm.to(first, non_blocking=True)
        for norm in norms
    ]
    return torch.linalg.vector_norm(torch.stack(same), kind)
