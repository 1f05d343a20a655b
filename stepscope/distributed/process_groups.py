"""The process groups of torch.distributed in this process, as far as torch's own lists tell.

They are private to torch (`_world`), found in `sys.modules`, and copied before they are read: the
training thread may make a group meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any


def groups() -> dict[str, tuple[int, ...]]:
    """Return torch's numbers of the ranks of each group by its name; {} where nothing is told."""
    names, ranks = _listed("pg_names"), _listed("pg_group_ranks")
    found = {}
    for group, name in names.items():
        members = ranks.get(group)
        if isinstance(name, str) and isinstance(members, dict):
            found[name] = tuple(sorted(rank for rank in dict(members) if type(rank) is int))
    return found


def uses_nccl() -> bool:
    """Say whether any group has NCCL as its backend."""
    return any("nccl" in str(backend) for backend in _listed("pg_backend_config").values())


def _listed(name: str) -> dict[Any, Any]:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return dict(getattr(getattr(module, "_world", None), name, None) or {})
    except (RuntimeError, TypeError):  # changed while it was copied; of another form
        return {}
