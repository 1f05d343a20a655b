"""What to change in the DataLoader that a script waits for. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.common.formatting import format_short_time
from stepscope.diagnosis.recommendations import proposed_workers
from stepscope.run_setup import Recommendation, RunSetup
from stepscope.session.training_facts import LoaderFacts

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
