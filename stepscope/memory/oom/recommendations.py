"""Recommend what to change after an out-of-memory error, the best first; pure, no I/O.

A run of the trainer gets settings, a script text and code; never a setting that is in force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepscope.memory.allocator import has_expandable_segments
from stepscope.memory.oom.record import MemoryKind, OomRecord
from stepscope.run_setup import (
    Recommendation,
    RunSetup,
    half_precision,
    setting_text,
)

MAX_RECOMMENDATIONS = 3

Allowed = Callable[[str, Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationPlan:
    """The recommendations of a cause: `first`, then those of the run's kind, then `last`.

    `settings` are those that a run of the trainer may change, `script` is for all other runs.
    """

    first: tuple[Recommendation, ...] = ()
    settings: tuple[str, ...] = ()
    script: tuple[Recommendation, ...] = ()
    last: tuple[Recommendation, ...] = ()


_AUTOCAST = Recommendation(
    "Run the forward pass under autocast, if it is not yet: activations take half the memory.",
    'with torch.autocast("cuda", torch.bfloat16):\n    loss = loss_of(model(inputs))',
)
_CHECKPOINTING = Recommendation(
    "Use activation checkpointing for the large blocks.",
    "hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)",
)
_EXPANDABLE = Recommendation(
    "Use expandable segments, set before the process starts CUDA (not on Windows, nor if tensors "
    "are shared between processes over CUDA IPC). Keep other settings, separated by commas.",
    "export PYTORCH_ALLOC_CONF=expandable_segments:True",
)
_APPLIED = {"bf16": _AUTOCAST, "checkpoint": _CHECKPOINTING}
"""The recommendation that a setting of a script makes void."""
_END_OTHERS = Recommendation(
    "End the other process or wait until it has ended, or choose another device.",
    "CUDA_VISIBLE_DEVICES=1 python train.py",
)
_SMALLER_SETTINGS = (
    "batch_size",
    "activation_checkpointing",
    "precision",
    "dataset_on_device",
)
_SMALLER = (
    Recommendation(
        "Use a smaller batch. In training, accumulate gradients over several: only the activations "
        "of one are live at a time. In a validation, turn gradients off with torch.no_grad().",
        "(loss / 2).backward()\nif i % 2:\n    optimizer.step()\n    optimizer.zero_grad()",
    ),
    _AUTOCAST,
    _CHECKPOINTING,
)
_LARGER_DEVICE = Recommendation("Choose a smaller model or a device with more memory.")

TOO_LARGE = RecommendationPlan(settings=_SMALLER_SETTINGS, script=_SMALLER, last=(_LARGER_DEVICE,))
OTHER_PROCESS = RecommendationPlan(
    first=(_END_OTHERS,), settings=_SMALLER_SETTINGS, script=_SMALLER
)
OPTIMIZER = RecommendationPlan(
    settings=("optimizer",),
    script=(
        Recommendation(
            "Use an optimizer with less state: 8-bit AdamW keeps a quarter, SGD with momentum "
            "half, Adafactor hardly any.",
        ),
        Recommendation(
            "Shard the optimizer state across GPUs.",
            "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
        ),
    ),
    last=(
        Recommendation(
            "Choose a smaller model or a device with more memory. A smaller batch hardly helps: "
            "its activations are freed before the optimizer's step."
        ),
    ),
)
FRAGMENTATION = RecommendationPlan(
    settings=("preallocate_memory", "copy_stream", "cuda_graphs", "batch_size"),
    script=(
        Recommendation(
            "Keep batch shapes alike, for example by padding to a few lengths: freed blocks then "
            "fit the next step."
        ),
        Recommendation(
            "Empty the cache where shapes change, for example between training and validation. A "
            "block that another stream or a CUDA graph used stays there.",
            "torch.cuda.empty_cache()",
        ),
    ),
    last=(_LARGER_DEVICE,),
)
GROWTH = RecommendationPlan(
    first=(
        Recommendation(
            "Look for tensors kept from earlier steps: a list of losses keeps every step's graph "
            "unless only the numbers are stored.",
            "losses.append(loss.item())  # not: losses.append(loss)",
        ),
        Recommendation(
            "Take two memory snapshots some steps apart; the stacks that grew in between hold the "
            "memory."
        ),
    ),
)
BATCHES = RecommendationPlan(
    first=(
        Recommendation(
            "Move results to the CPU, or keep only what is needed of them, such as the argmax or "
            "sums.",
            "with torch.no_grad():\n    results.append(model(inputs).argmax(-1).cpu())",
        ),
    ),
)
RETRY = RecommendationPlan(
    first=(
        Recommendation(
            "Retry after the except block, not within it: there the exception keeps the memory of "
            "the failed attempt.",
            "try:\n    loss = step(batch)\nexcept torch.OutOfMemoryError:\n    loss = None\n"
            "if loss is None:\n    loss = step(half)",
        ),
    ),
)
EARLIER = RecommendationPlan(
    first=(
        Recommendation(
            "Delete all that refers to the earlier model: the model, its optimizer, its scheduler, "
            "and losses with their graphs.",
            "del model, optimizer, scheduler",
        ),
    ),
)
OTHER_DEVICE = RecommendationPlan(
    first=(
        Recommendation(
            "Load checkpoints to the CPU or to the own GPU (map_location), and set the own GPU "
            "before the first CUDA call.",
            'torch.cuda.set_device(rank)\ntorch.load(path, map_location="cpu")',
        ),
    ),
)
HOST = RecommendationPlan(
    settings=("num_workers", "batch_size"),
    script=(
        Recommendation(
            "Load less at a time: fewer DataLoader workers that prefetch less, and large files "
            "mapped into memory (numpy.load with mmap_mode) or read in parts.",
            "DataLoader(data, num_workers=2, prefetch_factor=1)",
        ),
    ),
    last=(
        Recommendation(
            "Close other programs, give the container more memory, or use a machine with more "
            "memory."
        ),
    ),
)
PINNED = RecommendationPlan(
    settings=("copy_stream", "non_blocking", "pin_memory"),
    script=(
        Recommendation(
            "Pin fewer or smaller batches.",
            "DataLoader(data, pin_memory=True, num_workers=2, prefetch_factor=1)",
        ),
    ),
    last=(Recommendation("Raise the locked-memory limit (ulimit -l) or the container's memory."),),
)
_SWITCHES = {
    "activation_checkpointing": True,
    "preallocate_memory": True,
    "dataset_on_device": False,
    "copy_stream": False,
    "cuda_graphs": False,
    "non_blocking": False,
    "pin_memory": False,
}
"""Settings that need less memory when on, or when off."""


def recommendations(
    plan: RecommendationPlan,
    record: OomRecord,
    setup: RunSetup | None = None,
    allowed: Allowed | None = None,
) -> tuple[Recommendation, ...]:
    """Return at most three recommendations."""
    setup = setup or RunSetup(on_gpu=True, own=False)
    if setup.own:
        found = [*plan.first, *_changed_settings(plan, record, setup, allowed), *plan.last]
    else:
        void = [_APPLIED.get(name) for name in setup.applied]
        found = [one for one in (*plan.first, *plan.script, *plan.last) if one not in void]
    if plan is FRAGMENTATION and not has_expandable_segments(record.allocator):
        found = [_EXPANDABLE, *found]
    return tuple(found[:MAX_RECOMMENDATIONS])


def _changed_settings(
    plan: RecommendationPlan, record: OomRecord, setup: RunSetup, allowed: Allowed | None
) -> list[Recommendation]:
    found = []
    for name in plan.settings:
        value = _smaller_value(name, setup)
        if value is None or (allowed is not None and not allowed(name, value)):
            continue
        text = f"Try {setting_text(name, value)}"
        if name == "batch_size" and record.memory is MemoryKind.GPU:
            text += " with twice the accumulation"
        found.append(Recommendation(f"{text}.", name=name, value=value))
    return found


def _smaller_value(setting: str, setup: RunSetup) -> Any:
    """Return the value that needs less memory; None if there is none."""
    present = setup.config.get(setting)
    if setting in _SWITCHES:
        return _SWITCHES[setting] if present is (not _SWITCHES[setting]) else None
    if setting == "batch_size":
        return setup.number(setting) // 2 or None
    if setting == "num_workers":
        return setup.number(setting) // 2 if present else None
    if setting == "optimizer":
        return "sgd" if present in ("adam", "adamw") else None
    # The capability is unknown before the model is built.
    is_unknown = setup.capability is None and present in (None, "fp32", "tf32")
    return "bf16" if is_unknown else half_precision(setup)
