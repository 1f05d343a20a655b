"""What a measurement of collectives has written."""

from __future__ import annotations

from typing import Any

from trainer.collectives.measurement import MIB

ROW: dict[str, Any] = {
    "operation": "all_reduce",
    "bytes": MIB,
    "seconds": 1e-3,
    "algorithm": MIB / 1e-3,
    "bus": 1.5 * MIB / 1e-3,
}

DOCUMENT: dict[str, Any] = {
    "backend": "nccl",
    "ranks": 8,
    "machine": {"device": "H100", "link": {"name": "18 NVLinks", "bytes_per_s": 450e9}},
    "rows": [ROW, {"operation": "broadcast", "bytes": 2**30, "reason": "no room <b>"}],
}
