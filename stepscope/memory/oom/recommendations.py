"""What to do after memory ran out, the best first: settings of ours, or words and code. Pure.

Nothing is proposed that is set already: neither in the run's settings nor in the allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.bottleneck.recommendations import BF16_FROM, FP16_FROM, RunSetup, setting_text
from stepscope.common.formatting import format_bytes
from stepscope.memory.allocator import with_expandable
from stepscope.memory.oom.record import HostMemory, OomRecord

MOST_STEPS = 5

Allowed = Callable[[str, Any], bool]


class AdviceKind(StrEnum):
    """Which advice a verdict calls for."""

    SMALLER = "smaller"
    PIECES = "pieces"
    STREAMS = "streams"
    OTHERS = "others"
    GROWTH = "growth"
    NO_GRAD = "no_grad"
    LONG_BATCH = "long_batch"
    OPTIMIZER = "optimizer"
    HOST = "host"
    PINNED = "pinned"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecommendation:
    """One thing to try, in a sentence; the setting (`name`, `value`) or the code, if it is one."""

    text: str
    name: str | None = None
    value: Any = None
    code: str | None = None


def steps_to_take(
    advice: AdviceKind,
    record: OomRecord,
    setup: RunSetup | None = None,
    allowed: Allowed | None = None,
    *,
    has_pieces: bool = False,
) -> tuple[OomRecommendation, ...]:
    """Return what to try, the best first; `has_pieces` adds a step against fragmentation."""
    setup = setup or RunSetup(on_gpu=True, own=False)
    possible = allowed or (lambda name, value: True)
    found = []
    for step in _ORDER[advice](record, setup):
        if step.name is not None and not possible(step.name, step.value):
            continue
        if step not in found:
            found.append(step)
    if has_pieces:
        found[1:1] = _allocator(record)
    return tuple(found[:MOST_STEPS])


def _setting(name: str, value: Any, why: str = "") -> OomRecommendation:
    return OomRecommendation(text=f"Try {setting_text(name, value)}{why}.", name=name, value=value)


def _smaller(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    if setup.own:
        yield from _smaller_of_ours(setup)
    else:
        yield OomRecommendation(
            text="Halve the batch and accumulate gradients over two batches per step: only "
            "half the activations are live at a time.",
            code="(loss / 2).backward()\nif i % 2:\n"
            "    optimizer.step()\n    optimizer.zero_grad()",
        )
        yield OomRecommendation(
            text="Run the forward pass under autocast: activations take half the memory.",
            code='with torch.autocast("cuda", torch.bfloat16):\n    loss = loss_of(model(inputs))',
        )
        yield OomRecommendation(
            text="Use activation checkpointing for the large blocks.",
            code="hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)",
        )
    yield OomRecommendation(text="Choose a smaller model or a device with more memory.")


def _smaller_of_ours(setup: RunSetup) -> Iterator[OomRecommendation]:
    batch = setup.number("batch_size")
    if batch > 1:
        yield _setting("batch_size", batch // 2, " with twice the accumulation")
    if setup.config.get("activation_checkpointing") is False:
        yield _setting("activation_checkpointing", True)
    yield from _precisions(setup)
    if setup.is_on("dataset_on_device"):
        yield _setting("dataset_on_device", False)


def _precisions(setup: RunSetup) -> Iterator[OomRecommendation]:
    """Yield the 16 bits that the device has, where the run computes in 32."""
    if setup.text("precision", "fp32") not in ("fp32", "tf32"):
        return
    if setup.capability is None or setup.capability >= BF16_FROM:
        yield _setting("precision", "bf16")
    elif setup.capability >= FP16_FROM:
        yield _setting("precision", "fp16")


def _pieces(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    yield from _allocator(record)
    if setup.own:
        if setup.config.get("preallocate_memory") is False:
            yield _setting(
                "preallocate_memory", True, ": the largest step then takes its memory first"
            )
        yield from _smaller_of_ours(setup)
    else:
        yield OomRecommendation(
            text="Keep batch shapes alike, for example by padding to a few lengths: freed "
            "blocks then fit the next step."
        )
        yield OomRecommendation(
            text="Empty the cache where shapes change, for example between training and "
            "validation.",
            code="torch.cuda.empty_cache()",
        )


def _allocator(record: OomRecord) -> Iterator[OomRecommendation]:
    """Yield the setting of torch's allocator that is not in force.

    With expandable segments nothing is left to set: max_split_size_mb does not act on them.
    """
    settings = record.settings
    if settings.backend != "native":
        return
    if settings.expandable_segments is not True:
        yield OomRecommendation(
            text="Use expandable segments, set before the process starts CUDA (not on Windows, "
            "nor if tensors are shared between processes over CUDA IPC).",
            code=f"export PYTORCH_ALLOC_CONF={with_expandable(settings.text)}",
        )


def _streams(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    if setup.own:
        for name in ("copy_stream", "cuda_graphs"):
            if setup.is_on(name):
                yield _setting(name, False)
    else:
        yield OomRecommendation(
            text="Free what the other stream or graph used before this allocation, or create "
            "both tensors on one stream: a freed block stays with its stream.",
            code="torch.cuda.empty_cache()",
        )
    yield from _smaller(record, setup)


def _others(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    yours = [one for one in record.processes if one.yours]
    for one in sorted(yours, key=lambda each: -(each.memory or 0))[:1]:
        held = f", which held {format_bytes(one.memory)}" if one.memory is not None else ""
        name = f" ({one.name})" if one.name else ""
        # No command: the record may be old, and its number that of another process by now.
        yield OomRecommendation(
            text=f"End process {one.pid}{name}{held}, if it still runs: it was yours."
        )
    yield OomRecommendation(
        text="Wait until the other process has ended, or choose another device."
        if not yours
        else "Or choose another device.",
        code=None if setup.own else "CUDA_VISIBLE_DEVICES=1 python train.py",
    )
    yield from _smaller(record, setup)


def _growth(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    yield OomRecommendation(
        text="Look for tensors kept from earlier steps: a list of losses keeps every step's "
        "graph unless only the numbers are stored.",
        code="losses.append(loss.item())  # not: losses.append(loss)",
    )
    yield OomRecommendation(
        text="Take two memory snapshots some steps apart; the stacks that grew in between hold "
        "the memory."
    )


def _no_grad(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    yield OomRecommendation(
        text="Turn gradients off for validation, so that no activations are kept.",
        code="model.eval()\nwith torch.no_grad():\n    outputs = model(inputs)",
    )
    yield OomRecommendation(text="Or validate with a smaller batch than you train with.")


def _long_batch(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    if not setup.own:
        yield OomRecommendation(
            text="Cap the sample length, or fill batches by tokens instead of samples: one "
            "long sample makes the whole batch long.",
            code="tokens = tokens[:max_length]",
        )
    yield from _smaller(record, setup)


def _optimizer(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    """Yield what lowers the state: a smaller batch does not, its activations are freed by then."""
    if setup.own:
        if setup.text("optimizer", "") in ("adam", "adamw"):
            yield _setting("optimizer", "sgd", ", which keeps half of the state")
        if setup.text("precision", "fp32") not in ("pure_bf16", "pure_fp16"):
            yield _setting("precision", "pure_bf16", ": weights and state take half")
        if setup.is_on("dataset_on_device"):
            yield _setting("dataset_on_device", False)
        if setup.text("optimizer_impl", "") == "foreach":
            yield _setting("optimizer_impl", "fused", ": foreach copies all gradients")
    else:
        yield OomRecommendation(
            text="Use an optimizer with less state: 8-bit AdamW keeps a quarter, SGD with "
            "momentum half, Adafactor hardly any."
        )
        yield OomRecommendation(
            text="Shard the optimizer state across GPUs.",
            code="optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
        )
        yield OomRecommendation(
            text="Use the fused optimizer: it updates without copies of all gradients.",
            code="torch.optim.AdamW(model.parameters(), fused=True)",
        )
    yield OomRecommendation(
        text="Choose a smaller model or a device with more memory. A smaller batch hardly helps: "
        "its activations are freed before the optimizer's step."
    )


def is_beyond_host(record: OomRecord) -> bool:
    """Return True if one allocation is more than the host has in all."""
    total = None if record.host is None else record.host.limit or record.host.total
    return total is not None and (record.requested or 0) > total


def _held_by_workers(record: OomRecord) -> bool:
    """Return True if child processes hold as much as their parent, or a worker is what failed."""
    host = record.host or HostMemory()
    is_more = 0 < (host.children or 0) >= (host.process or 0)
    return is_more or "DataLoader worker" in (record.message or "")


def _host(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    if is_beyond_host(record):
        yield OomRecommendation(
            text="Check the shape: no setting makes one allocation of this size fit."
        )
        return
    workers = setup.number("num_workers")
    if setup.own:
        if workers:
            yield _setting("num_workers", workers // 2)
        if workers and setup.number("prefetch_factor") > 1:
            yield _setting("prefetch_factor", 1)
        batch = setup.number("batch_size")
        if batch > 1:
            yield _setting("batch_size", batch // 2, " with twice the accumulation")
    elif _held_by_workers(record):
        yield OomRecommendation(
            text="Use fewer workers, and have each prefetch less.",
            code="DataLoader(data, num_workers=2, prefetch_factor=1)",
        )
        yield OomRecommendation(
            text="Keep data in arrays or memory-mapped files: lists of Python objects are "
            "gradually copied into every worker."
        )
    else:
        yield OomRecommendation(
            text="Map large files into memory or read them in parts instead of loading them whole.",
            code='data = numpy.load(path, mmap_mode="r")',
        )
        if record.host is None or record.host.children is None:
            yield OomRecommendation(text="If a DataLoader has workers, use fewer of them.")
    if record.host is not None and record.host.limit is not None:
        yield OomRecommendation(text="Give the container more memory.")
    yield OomRecommendation(text="Close other programs, or use a machine with more memory.")


def _pinned(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    if setup.own:
        if setup.is_on("copy_stream"):
            yield _setting("copy_stream", False)
        for name in ("non_blocking", "pin_memory"):
            if setup.is_on(name):
                yield _setting(name, False)
        batch = setup.number("batch_size")
        if batch > 1:
            yield _setting("batch_size", batch // 2, " with twice the accumulation")
    else:
        yield OomRecommendation(
            text="Pin fewer or smaller batches.",
            code="DataLoader(data, pin_memory=True, num_workers=2, prefetch_factor=1)",
        )
    yield OomRecommendation(
        text="Raise the locked-memory limit (ulimit -l) or the container's memory."
    )


def _any(record: OomRecord, setup: RunSetup) -> Iterator[OomRecommendation]:
    yield from _smaller(record, setup)
    yield OomRecommendation(
        text="Take a memory snapshot of an earlier step: it shows which lines hold the memory."
    )


_ORDER: dict[AdviceKind, Callable[[OomRecord, RunSetup], Iterator[OomRecommendation]]] = {
    AdviceKind.SMALLER: _smaller,
    AdviceKind.PIECES: _pieces,
    AdviceKind.STREAMS: _streams,
    AdviceKind.OTHERS: _others,
    AdviceKind.GROWTH: _growth,
    AdviceKind.NO_GRAD: _no_grad,
    AdviceKind.LONG_BATCH: _long_batch,
    AdviceKind.OPTIMIZER: _optimizer,
    AdviceKind.HOST: _host,
    AdviceKind.PINNED: _pinned,
    AdviceKind.ANY: _any,
}
