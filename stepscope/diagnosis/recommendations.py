"""Recommendations for a bottleneck: a setting of RunConfig, or a text. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import format_short_time
from stepscope.run_setup import (
    BF16_FROM,
    Recommendation,
    RunSetup,
    half_precision,
    setting_text,
)
from stepscope.session.training_facts import LoaderFacts

MOST_WORKERS = 4  # Maximum number of workers proposed at first: each takes memory.
FEWEST_CORES = 2  # Minimum assumed: two workers that wait for a disk need no core each.
SHORT_STEP_S = 0.002  # Below, nothing shows that compiling pays.
LONG_STEP_S = 0.02  # Minimum step time for more CPU threads, which slow short operations.

UNKNOWN_LOADER = (
    "num_workers in the DataLoader pays where a batch takes much longer to make than to receive "
    "from another process, which takes about 1 ms."
)

Candidate = tuple[str, Any]


def next_to_try(
    kind: str, setup: RunSetup, allowed: Callable[[str, Any], bool]
) -> Recommendation | None:
    """Return the first recommendation for a `BottleneckKind` that is allowed and not set.

    Returns None if no setting is allowed, as on a machine without the GPU of the run.
    """
    if setup.own:
        candidates = list(_CANDIDATES[kind](setup)) if kind in _CANDIDATES else []
        for name, value in candidates:
            if allowed(name, value):
                return Recommendation(
                    text=f"Try {setting_text(name, value)}.", name=name, value=value
                )
        return None if candidates else Recommendation(text=_NOTHING_LEFT[kind])
    if kind == "compute-bound" and not setup.on_gpu:
        return Recommendation("A profile lists the operators that take the time.")
    if kind == "input-bound":
        return Recommendation(UNKNOWN_LOADER)
    return Recommendation(text=_script_text(kind, setup))


def proposed_workers(setup: RunSetup) -> int:
    """Return the number of DataLoader workers to try first."""
    return min(MOST_WORKERS, max(FEWEST_CORES, setup.cores))


def _input(setup: RunSetup) -> Iterator[Candidate]:
    workers = setup.number("num_workers")
    if setup.in_memory:
        if workers:
            yield "num_workers", 0
        elif setup.on_gpu and not setup.is_on("dataset_on_device"):
            yield "dataset_on_device", True
        return
    most = max(FEWEST_CORES, setup.cores)
    if workers:
        if setup.config.get("persistent_workers") is False:
            yield "persistent_workers", True
        more = min(2 * workers, most)
        if more > workers:
            yield "num_workers", more
        if setup.number("prefetch_factor") in range(1, 4):
            yield "prefetch_factor", 4
    elif not setup.is_on("dataset_on_device"):
        yield "num_workers", min(MOST_WORKERS, most)
        if setup.on_gpu:
            yield "dataset_on_device", True


def _transfer(setup: RunSetup) -> Iterator[Candidate]:
    for name in ("pin_memory", "non_blocking", "copy_stream", "dataset_on_device"):
        if not setup.is_on(name):
            yield name, True


def _launch(setup: RunSetup) -> Iterator[Candidate]:
    if setup.text("optimizer_impl", "") != "fused":
        yield "optimizer_impl", "fused"
    if not setup.is_on("cuda_graphs") and setup.text("compile_mode", "none") == "none":
        yield "cuda_graphs", True
        yield "compile_mode", "reduce-overhead"
    if setup.number("batch_size"):
        yield "batch_size", 2 * setup.number("batch_size")


def _compute(setup: RunSetup) -> Iterator[Candidate]:
    if setup.is_on("deterministic"):
        yield "deterministic", False
    if setup.on_gpu:
        if (precision := half_precision(setup)) is not None:
            yield "precision", precision
    elif setup.step_time >= LONG_STEP_S and setup.threads < setup.cores:
        yield "num_threads", setup.cores
    if 0 < setup.step_time < SHORT_STEP_S:
        return
    if setup.text("compile_mode", "none") == "none" and not setup.is_on("cuda_graphs"):
        yield "compile_mode", "default"
    if setup.is_on("activation_checkpointing"):
        yield "activation_checkpointing", False


_CANDIDATES: dict[str, Callable[[RunSetup], Iterator[Candidate]]] = {
    "input-bound": _input,
    "transfer-bound": _transfer,
    "launch-bound": _launch,
    "compute-bound": _compute,
}
_COOL = "Check the GPU's cooling, slot and power supply; no training setting helps."
_NOTHING_LEFT = {
    "input-bound": "All loading settings are in use: check what loading one sample does.",
    "transfer-bound": "All copy settings are in use: send smaller dtypes, such as uint8.",
    "launch-bound": "All launch settings are in use: a larger batch or model fills the gaps.",
    "compute-bound": "All compute settings are in use: try a smaller model or another device.",
    "throttled": _COOL,
}


def _script_text(kind: str, setup: RunSetup) -> str:
    """Return the changes of a script that no setting in effect has made already."""
    old = setup.capability is not None and setup.capability < BF16_FROM
    dtype = "float16, with a GradScaler," if old else "bfloat16"
    autocast = f"torch.autocast('cuda') in {dtype} around the forward pass, if it is not in use"
    options: dict[str, tuple[tuple[str, str], ...]] = {
        "transfer-bound": (
            ("pin_memory", "pin_memory=True in the DataLoader"),
            ("non_blocking", ".to(device, non_blocking=True) for each batch"),
        ),
        "launch-bound": (
            ("", "a larger batch"),
            ("fused", "fused=True in the optimizer"),
            ("compile", "torch.compile(model, mode='reduce-overhead')"),
        ),
        "compute-bound": (("bf16", autocast), ("compile", "torch.compile(model)")),
    }
    left = [text for name, text in options.get(kind, ()) if name not in setup.applied]
    joint = " and " if kind == "transfer-bound" else ", or "
    return f"Try {joint.join(left)}." if left else _NOTHING_LEFT[kind]


TRANSFER_S, TRANSFER_BYTES_PER_S = 6e-4, 6e9
"""Time in which the training thread receives a batch that a worker has ready: with torch 2.13 on
two busy cores 0.6 to 0.8 ms for one or two small tensors, 2 to 2.5 ms for 16 MiB (quartiles)."""
WORKERS_PAY = 3.0  # Minimum time to make a batch, as a multiple of that to receive it.
MOST = 0.5  # Minimum fraction of the wait that starts of passes take, to name them.


@dataclass(frozen=True, slots=True)
class LoaderAdvice:
    """A next step for a loader, the cause that it fits, and a sentence of evidence, or ""."""

    evidence: str = ""
    cause: str | None = None
    next: Recommendation | None = None


def advise_loader(
    loaders: Sequence[LoaderFacts], setup: RunSetup, delay: float = 0.0
) -> LoaderAdvice:
    """Return the advice for the loader with the longest wait.

    `delay` is the fraction of the time without a core, which is no cost of a batch.
    """
    loader = max(loaders, key=lambda one: one.wait_s + one.start_s)
    waited_s = loader.wait_s + loader.start_s
    usual_s = loader.wait_s / loader.batches if loader.batches else 0.0
    start_s = loader.start_s - loader.passes * usual_s
    if loader.workers and not loader.persistent and start_s >= MOST * waited_s:
        return _restarts(loader, start_s, waited_s)
    if not loader.is_map:
        return LoaderAdvice(
            f" Its data set {loader.dataset} is iterable.",
            next=Recommendation(
                "Each worker reads all of an iterable data set: first split it by "
                "torch.utils.data.get_worker_info(), then more workers pay."
            ),
        )
    if not pays_in_workers(loader, usual_s * (1 - delay)):
        return _cheap_samples(loader, usual_s)
    if loader.workers < proposed_workers(setup):
        text = f"Try num_workers={proposed_workers(setup)} in the DataLoader."
        return LoaderAdvice(_cost(loader, usual_s), next=Recommendation(text))
    return LoaderAdvice(
        f" Its {loader.workers} workers do not keep up.",
        next=Recommendation(
            f"Check what {loader.dataset}.__getitem__ does: in a run with num_workers=0 the "
            "table of lines shows which of its lines take the time."
        ),
    )


def pays_in_workers(loader: LoaderFacts, batch_s: float) -> bool:
    """Return True unless making a batch is not much slower than receiving it from a worker."""
    if loader.workers:
        return not loader.in_memory
    transfer_s = TRANSFER_S + loader.batch_bytes / TRANSFER_BYTES_PER_S
    return batch_s >= WORKERS_PAY * transfer_s


def _restarts(loader: LoaderFacts, start_s: float, waited_s: float) -> LoaderAdvice:
    each = format_short_time(start_s / max(1, loader.passes))
    evidence = (
        f" {start_s / waited_s:.0%} of the wait is the start of {loader.workers} workers in each "
        f"of {loader.passes} passes ({each} each)."
    )
    text = "Try persistent_workers=True in the DataLoader."
    if loader.in_memory:
        text = "Try num_workers=0 in the DataLoader: its data is in memory."
    return LoaderAdvice(evidence, "worker-restarts", Recommendation(text))


def _cheap_samples(loader: LoaderFacts, batch_s: float) -> LoaderAdvice:
    if loader.workers:
        text = "Try num_workers=0: its data is in memory, and workers must copy each batch."
        return LoaderAdvice(
            f" Its data set {loader.dataset} is in memory.", next=Recommendation(text)
        )
    text = (
        "Workers would not pay: a batch is made about as fast as a worker's would arrive. Larger "
        "batches, or slices of whole tensors without a DataLoader, cost less per sample."
    )
    return LoaderAdvice(_cost(loader, batch_s), next=Recommendation(text))


def _cost(loader: LoaderFacts, batch_s: float) -> str:
    return f" A batch of {loader.batch_size or 'unknown size'} takes {format_short_time(batch_s)}."
