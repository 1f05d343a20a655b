"""Earlier names of settings and workloads: run folders, checkpoints, links and plans have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

EARLIER_FIELDS = {
    "accumulation": "gradient_accumulation_steps",
    "bucket_mb": "bucket_cap_mb",
    "bucket_view": "gradient_as_bucket_view",
    "classes": "num_classes",
    "clip_norm": "max_grad_norm",
    "collective_timing": "time_collectives",
    "compile": "compile_mode",
    "context": "context_length",
    "data": "dataset",
    "data_on_device": "dataset_on_device",
    "flip": "horizontal_flip",
    "layers": "num_layers",
    "memory_warmup": "preallocate_memory",
    "nodes": "num_nodes",
    "own": "custom_options",
    "parallel": "strategy",
    "ranks": "devices_per_node",
    "reshard": "reshard_after_forward",
    "resume": "resume_from",
    "schedule": "lr_scheduler",
    "skip_broken": "skip_unreadable",
    "threads": "num_threads",
    "tied_head": "tie_embeddings",
    "warmup": "kernel_warmup",
}
EARLIER_WORKLOADS = {"fill": "memory_stress", "user": "custom"}
_NAME = re.compile(r"(?<![\w=.])[a-z_]+(?![\w])")


def current_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the current names of fields and workloads; a current name wins."""
    found = {EARLIER_FIELDS.get(name, name): value for name, value in values.items()}
    found |= {name: value for name, value in values.items() if name not in EARLIER_FIELDS}
    if isinstance(workload := found.get("workload"), str):
        found["workload"] = EARLIER_WORKLOADS.get(workload, workload)
    return found


def current_variant(name: str) -> str:
    """Return the current name of a lab's variant.

    >>> current_variant("num_workers=2+data_on_device=false")
    'num_workers=2+dataset_on_device=false'
    """
    return _NAME.sub(lambda match: EARLIER_FIELDS.get(match[0], match[0]), name)
