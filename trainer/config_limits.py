"""What the fields of a `RunConfig` may hold, besides their types."""

from __future__ import annotations

import re

# Inclusive bounds, also those of the sidebar's number fields.
LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, 100_000),
    "batch_size": (1, 65_536),
    "learning_rate": (1e-8, 100.0),
    "lr_warmup_steps": (0, 10**6),
    "max_grad_norm": (0.0, 1e6),
    "seed": (0, 2**31 - 1),
    "num_workers": (0, 64),
    "prefetch_factor": (1, 64),
    "width": (8, 16_384),  # below 8 channels oneDNN may write past a buffer: docs/training.md
    "image_size": (8, 1024),
    "num_threads": (0, 256),
    "gradient_accumulation_steps": (1, 1024),
    "max_steps": (0, 10**9),
    "num_layers": (1, 96),
    "context_length": (8, 4096),
    "num_classes": (2, 10_000),
    "dropout": (0.0, 0.9),
    "devices_per_node": (1, 64),
    "num_nodes": (1, 1024),
    "max_restarts": (0, 100),
    "bucket_cap_mb": (1, 1024),
}

CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/(best|last|step-[0-9]{1,12})\.pt")
_PART = r"\w[\w .,+@=()-]{0,99}"  # neither hidden nor "..", and nothing that leads out of a folder
_OWN_NAME = r"[a-z][a-z0-9_]{0,39}"
# Form, constraint and remedy of the fields that hold text.
TEXTS: dict[str, tuple[re.Pattern[str], str, str]] = {
    "device": (
        re.compile(r"cpu|(GPU|MIG)-[0-9A-Za-z/-]{1,80}"),
        "must be cpu or a GPU's UUID",
        "Choose a device from the list",
    ),
    "dataset": (
        re.compile(rf"({_PART}(/{_PART}){{0,7}})?"),
        "must be a path inside the data folder, without '..' or hidden names",
        "Choose data from the list",
    ),
    "custom_options": (
        re.compile(rf"({_OWN_NAME}(,{_OWN_NAME}){{0,31}})?"),
        "must be comma-separated names of the workload's own options",
        "Use lowercase letters, digits and _",
    ),
    "resume_from": (
        re.compile(rf"({CHECKPOINT.pattern})?"),
        "must be RUN_ID/best.pt, last.pt or step-N.pt",
        "Choose a checkpoint",
    ),
}
