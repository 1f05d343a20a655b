"""Recommend what to change after an out-of-memory error, the best first; pure, no I/O.

A run of the trainer gets settings, a script text and code; never a setting that is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stepscope.bottleneck.recommendations import (
    Recommendation,
    RunSetup,
    half_precision,
    setting_text,
)
from stepscope.memory.allocator import with_expandable
from stepscope.memory.oom.record import HostMemory, OomRecord
from stepscope.profiling.phase_ranges import FORWARD

MAX_DIVISOR = 2**16  # of a batch size
MAX_STEPS = 3

Allowed = Callable[[str, Any], bool]


Steps = Iterator[Recommendation]
AdviceKind = Callable[[OomRecord, RunSetup], Steps]  # One of the functions below.


def steps_to_take(
    advice: AdviceKind,
    record: OomRecord,
    setup: RunSetup | None = None,
    allowed: Allowed | None = None,
    *,
    has_pieces: bool = False,
) -> tuple[Recommendation, ...]:
    """Return the recommendations; `has_pieces` adds one against fragmentation."""
    steps = [
        step
        for step in advice(record, setup or RunSetup(on_gpu=True, own=False))
        if allowed is None or step.name is None or allowed(step.name, step.value)
    ]
    if has_pieces:
        steps[1:1] = _allocator(record)
    return tuple(steps[:MAX_STEPS])


def _setting(name: str, value: Any, why: str = "") -> Recommendation:
    return Recommendation(f"Try {setting_text(name, value)}{why}.", name=name, value=value)


def _off(setup: RunSetup, *names: str) -> Steps:
    return (_setting(name, False) for name in names if setup.is_on(name))


def batch_divisor(record: OomRecord) -> int:
    """Return 2, or the power of two that makes one request as large as the device fit into it."""
    divisor, limit = 2, record.allowed or record.total or 0
    while limit > 0 and (record.requested or 0) > divisor * limit and divisor < MAX_DIVISOR:
        divisor *= 2
    return divisor


def _smaller_batch(setup: RunSetup, divisor: int) -> Steps:
    batch = setup.number("batch_size")
    if batch > 1:
        divisor = min(divisor, int(batch))
        times = "twice the accumulation" if divisor == 2 else f"{divisor} times the accumulation"
        yield _setting("batch_size", batch // divisor, f" with {times}")


def smaller(record: OomRecord, setup: RunSetup) -> Steps:
    if record.training is False and record.grad is True:
        yield Recommendation(
            "If this is a validation, turn gradients off, so that no activations are kept.",
            "model.eval()\nwith torch.no_grad():\n    outputs = model(inputs)",
        )
    if setup.own:
        yield from _smaller_by_settings(setup, batch_divisor(record))
    elif record.grad is False:
        yield Recommendation(
            "Evaluate in smaller batches. Gradients were off, so accumulation and activation "
            "checkpointing save nothing."
        )
        yield from _shorter(record)
    else:
        yield Recommendation(
            "Halve the batch and accumulate gradients over two batches per step: only "
            "half the activations are live at a time.",
            "(loss / 2).backward()\nif i % 2:\n    optimizer.step()\n    optimizer.zero_grad()",
        )
        yield from _shorter(record)
        if "bf16" not in setup.applied and not record.autocast:
            # After the forward pass autocast is off, whether it was in use or not.
            is_unused = record.autocast is False and record.phase == FORWARD
            unless = "" if is_unused else ", if it is not yet"
            yield Recommendation(
                f"Run the forward pass under autocast{unless}: activations take half the memory.",
                'with torch.autocast("cuda", torch.bfloat16):\n    loss = loss_of(model(inputs))',
            )
        if "checkpoint" not in setup.applied:
            yield Recommendation(
                "Use activation checkpointing for the large blocks.",
                "hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)",
            )
    yield Recommendation("Choose a smaller model or a device with more memory.")


def _shorter(record: OomRecord) -> Steps:
    if record.steps_done:
        yield Recommendation(
            "If samples differ in length, limit it: the longest one sets the size of a batch.",
            "tokens = tokens[:max_length]",
        )


def _smaller_by_settings(setup: RunSetup, divisor: int) -> Steps:
    yield from _smaller_batch(setup, divisor)
    if setup.config.get("activation_checkpointing") is False:
        yield _setting("activation_checkpointing", True)
    # Unknown before the model is built.
    is_unknown = setup.capability is None and setup.text("precision", "fp32") in ("fp32", "tf32")
    if (precision := "bf16" if is_unknown else half_precision(setup)) is not None:
        yield _setting("precision", precision)
    yield from _off(setup, "dataset_on_device")


def pieces(record: OomRecord, setup: RunSetup) -> Steps:
    yield from _allocator(record)
    if setup.own:
        if setup.config.get("preallocate_memory") is False:
            yield _setting("preallocate_memory", True, ": the largest step takes its memory first")
        yield from _off(setup, "copy_stream", "cuda_graphs")  # each reserves separate memory
        yield from _smaller_by_settings(setup, 2)
        return
    yield Recommendation(
        "Keep batch shapes alike, for example by padding to a few lengths: freed blocks then fit "
        "the next step."
    )
    yield Recommendation(
        "Empty the cache where shapes change, for example between training and validation. A "
        "block that another stream or a CUDA graph used stays there.",
        "torch.cuda.empty_cache()",
    )


def _allocator(record: OomRecord) -> Steps:
    """Yield expandable segments unless in force; max_split_size_mb does not act on them."""
    settings = record.settings
    if settings.backend == "native" and settings.expandable_segments is not True:
        yield Recommendation(
            "Use expandable segments, set before the process starts CUDA (not on Windows, "
            "nor if tensors are shared between processes over CUDA IPC).",
            f"export PYTORCH_ALLOC_CONF={with_expandable(settings.text)}",
        )


def others(record: OomRecord, setup: RunSetup) -> Steps:
    yield Recommendation(
        "End the other process or wait until it has ended, or choose another device.",
        None if setup.own else "CUDA_VISIBLE_DEVICES=1 python train.py",
    )
    yield from smaller(record, setup)


def growth(record: OomRecord, setup: RunSetup) -> Steps:
    yield Recommendation(
        "Look for tensors kept from earlier steps: a list of losses keeps every step's "
        "graph unless only the numbers are stored.",
        "losses.append(loss.item())  # not: losses.append(loss)",
    )
    yield Recommendation(
        "Take two memory snapshots some steps apart; the stacks that grew in between hold "
        "the memory."
    )


def optimizer(record: OomRecord, setup: RunSetup) -> Steps:
    """Yield steps that shrink the state; a smaller batch does not."""
    if setup.text("optimizer", "") in ("adam", "adamw"):
        yield _setting("optimizer", "sgd", ", which keeps half of the state")
    if setup.own and setup.text("precision", "fp32") not in ("pure_bf16", "pure_fp16"):
        yield _setting("precision", "pure_bf16", ": weights and state take half")
    if not setup.own:
        yield Recommendation(
            "Use an optimizer with less state: 8-bit AdamW keeps a quarter, SGD with "
            "momentum half, Adafactor hardly any."
        )
        yield Recommendation(
            "Shard the optimizer state across GPUs.",
            "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
        )
    yield Recommendation(
        "Choose a smaller model or a device with more memory. A smaller batch hardly helps: "
        "its activations are freed before the optimizer's step."
    )


def host(record: OomRecord, setup: RunSetup) -> Steps:
    memory, workers = record.host or HostMemory(), setup.number("num_workers")
    workers_hold_more = 0 < (memory.children or 0) >= (memory.process or 0)
    if setup.own:
        if workers:
            yield _setting("num_workers", workers // 2)
        yield from _smaller_batch(setup, 2)
    elif workers_hold_more or "DataLoader worker" in (record.message or ""):
        yield Recommendation(
            "Use fewer workers, and have each prefetch less.",
            "DataLoader(data, num_workers=2, prefetch_factor=1)",
        )
    else:
        yield Recommendation(
            "Map large files into memory or read them in parts instead of loading them whole.",
            'data = numpy.load(path, mmap_mode="r")',
        )
    if memory.limit is not None:
        yield Recommendation("Give the container more memory.")
    yield Recommendation("Close other programs, or use a machine with more memory.")


def pinned(record: OomRecord, setup: RunSetup) -> Steps:
    yield from _off(setup, "copy_stream", "non_blocking", "pin_memory")
    if not setup.own:
        yield Recommendation(
            "Pin fewer or smaller batches.",
            "DataLoader(data, pin_memory=True, num_workers=2, prefetch_factor=1)",
        )
    yield Recommendation("Raise the locked-memory limit (ulimit -l) or the container's memory.")
