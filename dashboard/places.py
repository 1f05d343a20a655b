"""Where in the sidebar a setting is that a verdict may propose; pure."""

from __future__ import annotations

PLACES: dict[str, str] = {
    **dict.fromkeys(
        ("pin_memory", "non_blocking", "copy_stream", "data_on_device"), "Data loading"
    ),
    **dict.fromkeys(("num_workers", "prefetch_factor", "persistent_workers"), "Data loading"),
    "fused": "Optimizer",
    **dict.fromkeys(("compile", "cuda_graphs", "deterministic"), "Kernels and graphs"),
    "activation_checkpointing": "Memory",
    "threads": "More, CPU threads",
}
"""The folded group of a field, and the field's label where it is not its name."""
