"""Recommend what to change after an out-of-memory error, the best first; pure, no I/O.

A run of the trainer gets settings, a script gets text and code. A setting that is already in force,
of the run or of the allocator, is never recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stepscope.bottleneck.recommendations import BF16_FROM, FP16_FROM, RunSetup, setting_text
from stepscope.common.formatting import format_bytes
from stepscope.memory.allocator import with_expandable
from stepscope.memory.oom.record import HostMemory, OomRecord

MAX_STEPS = 5

Allowed = Callable[[str, Any], bool]


@dataclass(frozen=True, slots=True)
class RemedyStep:
    """One recommendation as a sentence, with code or a setting (`name`, `value`) if it has one."""

    text: str
    code: str | None = None
    name: str | None = None
    value: Any = None


Steps = Iterator[RemedyStep]
AdviceKind = Callable[[OomRecord, RunSetup], Steps]  # One of the functions below.


def steps_to_take(
    advice: AdviceKind,
    record: OomRecord,
    setup: RunSetup | None = None,
    allowed: Allowed | None = None,
    *,
    has_pieces: bool = False,
) -> tuple[RemedyStep, ...]:
    """Return the recommendations; `has_pieces` adds one against fragmentation."""
    steps: list[RemedyStep] = []
    for step in advice(record, setup or RunSetup(on_gpu=True, own=False)):
        is_possible = allowed is None or step.name is None or allowed(step.name, step.value)
        if is_possible and step not in steps:
            steps.append(step)
    if has_pieces:
        steps[1:1] = _allocator(record)
    return tuple(steps[:MAX_STEPS])


def _setting(name: str, value: Any, why: str = "") -> RemedyStep:
    return RemedyStep(f"Try {setting_text(name, value)}{why}.", name=name, value=value)


def _off(setup: RunSetup, *names: str) -> Steps:
    return (_setting(name, False) for name in names if setup.is_on(name))


def _half_batch(setup: RunSetup) -> Steps:
    batch = setup.number("batch_size")
    if batch > 1:
        yield _setting("batch_size", batch // 2, " with twice the accumulation")


def smaller(record: OomRecord, setup: RunSetup) -> Steps:
    if setup.own:
        yield from _smaller_by_settings(setup)
    else:
        yield RemedyStep(
            "Halve the batch and accumulate gradients over two batches per step: only "
            "half the activations are live at a time.",
            "(loss / 2).backward()\nif i % 2:\n    optimizer.step()\n    optimizer.zero_grad()",
        )
        yield RemedyStep(
            "Run the forward pass under autocast: activations take half the memory.",
            'with torch.autocast("cuda", torch.bfloat16):\n    loss = loss_of(model(inputs))',
        )
        yield RemedyStep(
            "Use activation checkpointing for the large blocks.",
            "hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)",
        )
    yield RemedyStep("Choose a smaller model or a device with more memory.")


def _smaller_by_settings(setup: RunSetup) -> Steps:
    yield from _half_batch(setup)
    if setup.config.get("activation_checkpointing") is False:
        yield _setting("activation_checkpointing", True)
    if setup.text("precision", "fp32") in ("fp32", "tf32"):
        if setup.capability is None or setup.capability >= BF16_FROM:
            yield _setting("precision", "bf16")
        elif setup.capability >= FP16_FROM:
            yield _setting("precision", "fp16")
    yield from _off(setup, "dataset_on_device")


def pieces(record: OomRecord, setup: RunSetup) -> Steps:
    yield from _allocator(record)
    if setup.config.get("preallocate_memory") is False and setup.own:
        yield _setting("preallocate_memory", True, ": the largest step then takes its memory first")
    if setup.own:
        yield from _smaller_by_settings(setup)
        return
    yield RemedyStep(
        "Keep batch shapes alike, for example by padding to a few lengths: freed blocks then fit "
        "the next step."
    )
    yield RemedyStep(
        "Empty the cache where shapes change, for example between training and validation.",
        "torch.cuda.empty_cache()",
    )


def _allocator(record: OomRecord) -> Steps:
    """Yield expandable segments unless they are in force.

    With expandable segments no other setting is left: max_split_size_mb does not act on them.
    """
    settings = record.settings
    if settings.backend == "native" and settings.expandable_segments is not True:
        yield RemedyStep(
            "Use expandable segments, set before the process starts CUDA (not on Windows, "
            "nor if tensors are shared between processes over CUDA IPC).",
            f"export PYTORCH_ALLOC_CONF={with_expandable(settings.text)}",
        )


def streams(record: OomRecord, setup: RunSetup) -> Steps:
    yield from _off(setup, "copy_stream", "cuda_graphs")
    if not setup.own:
        yield RemedyStep(
            "Free what the other stream or graph used before this allocation, or create "
            "both tensors on one stream: a freed block stays with its stream.",
            "torch.cuda.empty_cache()",
        )
    yield from smaller(record, setup)


def others(record: OomRecord, setup: RunSetup) -> Steps:
    yours = [process for process in record.processes if process.yours]
    largest = max(yours, key=lambda process: process.memory or 0, default=None)
    wait = "Wait until the other process has ended, or choose another device."
    if largest is not None:
        held = "" if largest.memory is None else f", which held {format_bytes(largest.memory)}"
        name = f" ({largest.name})" if largest.name else ""
        # No kill command: in an old record the pid may belong to another process by now.
        yield RemedyStep(f"End process {largest.pid}{name}{held}, if it still runs: it was yours.")
        wait = "Or choose another device."
    yield RemedyStep(wait, None if setup.own else "CUDA_VISIBLE_DEVICES=1 python train.py")
    yield from smaller(record, setup)


def growth(record: OomRecord, setup: RunSetup) -> Steps:
    yield RemedyStep(
        "Look for tensors kept from earlier steps: a list of losses keeps every step's "
        "graph unless only the numbers are stored.",
        "losses.append(loss.item())  # not: losses.append(loss)",
    )
    yield RemedyStep(
        "Take two memory snapshots some steps apart; the stacks that grew in between hold "
        "the memory."
    )


def no_grad(record: OomRecord, setup: RunSetup) -> Steps:
    yield RemedyStep(
        "Turn gradients off for validation, so that no activations are kept.",
        "model.eval()\nwith torch.no_grad():\n    outputs = model(inputs)",
    )
    yield RemedyStep("Or validate with a smaller batch than you train with.")


def long_batch(record: OomRecord, setup: RunSetup) -> Steps:
    if not setup.own:
        yield RemedyStep(
            "Cap the sample length, or fill batches by tokens instead of samples: one "
            "long sample makes the whole batch long.",
            "tokens = tokens[:max_length]",
        )
    yield from smaller(record, setup)


def optimizer(record: OomRecord, setup: RunSetup) -> Steps:
    """Yield steps that shrink the state; a smaller batch does not."""
    if setup.text("optimizer", "") in ("adam", "adamw"):
        yield _setting("optimizer", "sgd", ", which keeps half of the state")
    if setup.own and setup.text("precision", "fp32") not in ("pure_bf16", "pure_fp16"):
        yield _setting("precision", "pure_bf16", ": weights and state take half")
    yield from _off(setup, "dataset_on_device")
    if setup.text("optimizer_impl", "") == "foreach":
        yield _setting("optimizer_impl", "fused", ": foreach copies all gradients")
    if not setup.own:
        yield RemedyStep(
            "Use an optimizer with less state: 8-bit AdamW keeps a quarter, SGD with "
            "momentum half, Adafactor hardly any."
        )
        yield RemedyStep(
            "Shard the optimizer state across GPUs.",
            "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
        )
        yield RemedyStep(
            "Use the fused optimizer: it updates without copies of all gradients.",
            "torch.optim.AdamW(model.parameters(), fused=True)",
        )
    yield RemedyStep(
        "Choose a smaller model or a device with more memory. A smaller batch hardly helps: "
        "its activations are freed before the optimizer's step."
    )


def is_beyond_host(record: OomRecord) -> bool:
    """Return True if one allocation is larger than all memory of the host or its container."""
    total = None if record.host is None else record.host.limit or record.host.total
    return total is not None and (record.requested or 0) > total


def host(record: OomRecord, setup: RunSetup) -> Steps:
    if is_beyond_host(record):
        yield RemedyStep("Check the shape: no setting makes one allocation of this size fit.")
        return
    memory, workers = record.host or HostMemory(), setup.number("num_workers")
    workers_hold_more = 0 < (memory.children or 0) >= (memory.process or 0)
    if setup.own:
        if workers:
            yield _setting("num_workers", workers // 2)
        if workers and setup.number("prefetch_factor") > 1:
            yield _setting("prefetch_factor", 1)
        yield from _half_batch(setup)
    elif workers_hold_more or "DataLoader worker" in (record.message or ""):
        yield RemedyStep(
            "Use fewer workers, and have each prefetch less.",
            "DataLoader(data, num_workers=2, prefetch_factor=1)",
        )
        yield RemedyStep(
            "Keep data in arrays or memory-mapped files: lists of Python objects are "
            "gradually copied into every worker."
        )
    else:
        yield RemedyStep(
            "Map large files into memory or read them in parts instead of loading them whole.",
            'data = numpy.load(path, mmap_mode="r")',
        )
        if memory.children is None:
            yield RemedyStep("If a DataLoader has workers, use fewer of them.")
    if memory.limit is not None:
        yield RemedyStep("Give the container more memory.")
    yield RemedyStep("Close other programs, or use a machine with more memory.")


def pinned(record: OomRecord, setup: RunSetup) -> Steps:
    yield from _off(setup, "copy_stream", "non_blocking", "pin_memory")
    yield from _half_batch(setup)
    if not setup.own:
        yield RemedyStep(
            "Pin fewer or smaller batches.",
            "DataLoader(data, pin_memory=True, num_workers=2, prefetch_factor=1)",
        )
    yield RemedyStep("Raise the locked-memory limit (ulimit -l) or the container's memory.")


def anything(record: OomRecord, setup: RunSetup) -> Steps:
    yield from smaller(record, setup)
    yield RemedyStep(
        "Take a memory snapshot of an earlier step: it shows which lines hold the memory."
    )
