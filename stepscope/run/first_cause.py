"""Which rank of a distributed run ended first; its end then ends all other ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.run.status import STALE_S

NAMED = 8
"""Ranks that a sentence names at most."""

_OF_A_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|pair closure|Socket Timeout"
    r"|remote process exited|ncclRemoteError|DistNetworkError|DistStoreError"
    r"|collective operation timeout|[Tt]imed out waiting \w+ for \w+ operation|wait timeout after"
    r"|another rank had failed"
)
"""Words of gloo, NCCL, torch's store and our own when another rank is gone, or does not come."""
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|pair closure|remote process exited|ncclRemoteError"
)
"""Those of them that a process which is gone leaves behind, and one that is late does not."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended: `reason` is what it wrote itself, None if it wrote nothing.

    It ended between `earliest` and `latest`, in epoch seconds: they are equal if it wrote when.
    """

    number: int
    earliest: float
    latest: float
    reason: str | None

    @property
    def of_a_peer(self) -> bool:
        """Say whether it ended because another rank had."""
        return self.reason is not None and _OF_A_PEER.search(self.reason) is not None

    @property
    def lost_peer(self) -> bool:
        """Say whether it ended because the process of another rank was gone."""
        return self.reason is not None and _LOST_PEER.search(self.reason) is not None


def first_cause(ends: Sequence[RankEnd], *, together_s: float) -> list[RankEnd]:
    """Return the end that caused the others; empty without ends.

    An error about the connection to another rank is a cause only if there is no other error. Among
    the rest the earliest end counts. A rank that is gone without a word comes before one that has
    lost the connection to it, by STALE_S at most: hosts' clocks differ, and a file may be written
    once more. Ranks that ended without a reason within `together_s` of each other are all returned:
    which was first is not known.
    """
    spoken = sorted((end for end in ends if end.reason is not None), key=lambda end: end.earliest)
    gone = sorted((end for end in ends if end.reason is None), key=lambda end: end.earliest)
    own = next((end for end in spoken if not end.of_a_peer), None)
    if own is not None and (not gone or own.earliest <= gone[0].latest):
        return [own]
    margin_s = STALE_S if spoken and spoken[0].lost_peer else 0.0
    if gone and (not spoken or gone[0].earliest <= spoken[0].earliest + margin_s):
        return [end for end in gone if end.earliest <= gone[0].earliest + together_s]
    return spoken[:1]


def left_early(cause: RankEnd, finished: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that returned without an error while `cause` still needed it, if one did.

    A cause of another kind than a lost connection has no such rank.
    """
    if not cause.of_a_peer:
        return None
    margin_s = STALE_S if cause.lost_peer else 0.0
    before = (end for end in finished if end.earliest <= cause.earliest + margin_s)
    return min(before, key=lambda end: end.earliest, default=None)


def names(numbers: Sequence[int], world_size: int) -> str:
    """Return these ranks as the subject of a sentence, with its "is" or "are"."""
    if len(numbers) == 1:
        return f"Rank {numbers[0]} is"
    if len(numbers) == world_size:
        return f"All {world_size} ranks are"
    listed = ", ".join(str(number) for number in numbers[:NAMED])
    return f"Ranks {listed}{', …' if len(numbers) > NAMED else ''} are"
