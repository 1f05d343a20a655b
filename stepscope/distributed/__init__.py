"""Jobs of several ranks: launchers, collectives, stragglers and hangs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

NAMED = 8  # Maximum number of ranks that a sentence lists.
ONE_MACHINE = (
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--local-addr=localhost",
)
"""torchrun's arguments for ranks on this machine, with any free port.

Without a local address, as with --standalone, torchrun hangs if the host name does not resolve to
this machine.
"""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the text of some ranks.

    >>> ranks_text([2]), ranks_text([0, 2])
    ('rank 2', 'ranks 0, 2')
    """
    shown = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def rank_and_size() -> tuple[int, int] | None:
    """Return torch.distributed's rank and world size without importing torch; None if unknown."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return dist.get_rank(), dist.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # partly imported, or at shutdown
        return None
