"""The prediction for a configuration, and whether that fits into what a device has free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from stepscope.common.formatting import format_bytes
from trainer.config import RunConfig, Runner, Workload
from trainer.config_validation import TrainDevice
from trainer.custom_workload import place_in_user_code
from trainer.error_messages import RunFailed
from trainer.memory_estimate.distributed_memory import NCCL_NOTE, buckets, other_ranks, refusal
from trainer.memory_estimate.free import Free
from trainer.memory_estimate.peak import Peak, device_peak, host_peak
from trainer.memory_estimate.safety_margin import DEFAULT, Margin
from trainer.memory_estimate.simulate import Played, play

CONTEXT = 512 * 2**20
"""A process's CUDA context on a recent GPU; a guess, which no GPU has confirmed yet."""
ASSUMED = (9, 0)
"""Of a GPU that does not tell its compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a run needs, in bytes; `seconds` is how long it took to say so."""

    config: RunConfig
    device: str
    """The name of the device."""
    peak: Peak
    outside: dict[str, int] = field(default_factory=dict)
    """What the run takes on the device or host besides what torch allocates for the training."""
    samples: int
    """Of an epoch: no batch is larger."""
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> int:
        """What torch takes from the device: on a GPU with its cache."""
        return self.peak.allocated if self.peak.reserved is None else self.peak.reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a prediction fits; None where that cannot be said, for the `reason`."""

    fits: bool | None
    reason: str
    needed: int
    """Bytes with the margin, and with what is outside of torch."""


def predict(config: RunConfig, device: TrainDevice) -> Prediction:
    """Predict the peak of a run; takes seconds, in a process that then does nothing else.

    Of several ranks it is the peak of each one's device. Raises RunFailed for data that cannot be
    used, for a model that reads values, and for kinds of parallelism that are not predicted.
    """
    refused = refusal(config)
    if refused is not None:
        raise RunFailed(refused)
    began = time.perf_counter()
    on_gpu = device.cuda_index is not None
    capability = capability_of(device)
    before = psutil.Process().memory_info().rss
    try:
        played = play(config, capability)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = place_in_user_code(error) if config.workload is Workload.USER else None
        raise RunFailed(
            f"The model's code reads tensor values ({place or error}), and fake tensors have "
            "none. Run `stepscope fit` on a script that trains it."
        ) from error
    find = device_peak if on_gpu else host_peak
    peak = find(played.events, played.parts)
    return Prediction(
        config=config,
        device=device.name,
        peak=peak,
        outside=(
            {"context": CONTEXT, **buckets(config, peak)}
            if capability
            else _on_host(config, peak, played, before)
        ),
        samples=played.samples,
        seconds=time.perf_counter() - began,
        notes=(*played.notes, *((NCCL_NOTE,) if on_gpu and config.distributed else ())),
    )


def capability_of(device: TrainDevice) -> tuple[int, int] | None:
    """Return the compute capability for which is predicted; None for a CPU."""
    return None if device.cuda_index is None else device.compute_capability or ASSUMED


def judge(prediction: Prediction, free: Free, margin: Margin = DEFAULT) -> Verdict:
    """Compare a prediction with what is free. Pure."""
    outside = sum(prediction.outside.values())
    needed = round(prediction.taken * margin.factor) + outside
    if free.bytes is None:
        return Verdict(fits=None, reason=free.reason or "Free memory is unknown.", needed=needed)
    room = format_bytes(free.bytes)
    if prediction.taken + outside > free.bytes:
        least = format_bytes(prediction.taken + outside)
        return Verdict(
            fits=False,
            reason=f"Needs about {least}; {room} is free. Use a smaller batch or model.",
            needed=needed,
        )
    with_margin = f"{format_bytes(needed)} with a margin of {100 * (margin.factor - 1):.0f} %"
    if needed > free.bytes:
        return Verdict(
            fits=None,
            reason=f"Close call: {with_margin}; {room} is free. Use a smaller batch.",
            needed=needed,
        )
    return Verdict(fits=True, reason=f"Needs {with_margin}; {room} is free.", needed=needed)


def _on_host(config: RunConfig, peak: Peak, played: Played, process: int) -> dict[str, int]:
    """What a run on the CPU takes of the host's memory besides its tensors."""
    found = {"data_set": played.data_bytes} if played.data_bytes else {}
    found |= buckets(config, peak)
    if config.num_workers:
        batches = config.num_workers * config.prefetch_factor
        found["prefetched_batches"] = batches * played.batch_bytes
    if config.runner is not Runner.THREAD:
        found["process"] = process
    return found | other_ranks(config, peak.allocated + sum(found.values()))


def to_json(prediction: Prediction, verdict: Verdict, free: Free, margin: Margin) -> dict[str, Any]:
    """Return what `python -m trainer.memory_estimate --json` prints."""
    return {
        "predicted_peak_bytes": prediction.peak.allocated,
        "parts": prediction.peak.parts,
        "predicted_reserved_bytes": prediction.peak.reserved,
        "outside": prediction.outside,
        "needed_bytes": verdict.needed,
        "device": prediction.config.device,
        "device_name": prediction.device,
        "free_bytes": free.bytes,
        "total_bytes": free.total,
        "margin": {"factor": margin.factor, "runs": margin.runs, "source": margin.source},
        "fits": verdict.fits,
        "reason": verdict.reason,
        "notes": list(prediction.notes),
        "seconds": round(prediction.seconds, 3),
        "config": prediction.config.to_dict(),
    }
