"""Earlier names of settings and workloads, as in run folders, checkpoints, links and plans."""

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
EARLIER_IMPLS = ("fused", "foreach")
"""Earlier switches, now values of optimizer_impl; with both off its value is for-loop."""
_IMPL = re.compile(r"(?<![\w=.])(fused|foreach)(?:=(true|false))?(?![\w=])")
_NAME = re.compile(r"(?<![\w=.])[a-z_]+(?![\w])")


def current_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the current names of fields and workloads; a current name wins.

    >>> current_settings({"accumulation": 2, "workload": "fill", "seed": 0})
    {'gradient_accumulation_steps': 2, 'workload': 'memory_stress', 'seed': 0}
    >>> current_settings({"fused": False, "foreach": True}), current_settings({"fused": "0"})
    ({'optimizer_impl': 'foreach'}, {'optimizer_impl': 'for-loop'})
    """
    given = {name: value for name, value in values.items() if name not in EARLIER_IMPLS}
    settings = {EARLIER_FIELDS.get(name, name): value for name, value in given.items()}
    settings |= {name: value for name, value in given.items() if name not in EARLIER_FIELDS}
    if "optimizer_impl" not in settings and len(given) < len(values):
        settings["optimizer_impl"] = _optimizer_impl(values)
    if isinstance(workload := settings.get("workload"), str):
        settings["workload"] = EARLIER_WORKLOADS.get(workload, workload)
    return settings


def _optimizer_impl(values: Mapping[str, Any]) -> Any:
    """Return optimizer_impl for the earlier switches; an invalid switch is returned unchanged."""
    found = "for-loop"
    for name in reversed(EARLIER_IMPLS):
        value = values.get(name, False)
        text = value.lower() if isinstance(value, str) else value
        if text not in (True, False, "1", "true", "0", "false"):
            return value
        found = name if text in (True, "1", "true") else found
    return found


def current_variant(name: str) -> str:
    """Return the current name of a lab's variant.

    >>> current_variant("accumulation=4"), current_variant("num_workers=2+data_on_device=false")
    ('gradient_accumulation_steps=4', 'num_workers=2+dataset_on_device=false')
    >>> current_variant("fused"), current_variant("foreach=false+seed=1")
    ('optimizer_impl=fused', 'optimizer_impl=for-loop+seed=1')
    """
    name = _IMPL.sub(
        lambda match: f"optimizer_impl={'for-loop' if match[2] == 'false' else match[1]}", name
    )
    return _NAME.sub(lambda match: EARLIER_FIELDS.get(match[0], match[0]), name)
