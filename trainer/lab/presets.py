"""Presets of the lab page and `--preset`: a baseline and the variants to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepscope.host.environment import granted_cores
from stepscope.lab.plan import Variant
from trainer.config import OptimizerImpl, Precision, RunConfig, Runner, Strategy, issue
from trainer.lab.plan import GPU_OFF, LAB_SETTINGS, NOT_TIMED, make_variant, suggested
from trainer.training.config_validation import TrainDevice

Devices = Sequence[TrainDevice]
_LOADING = (
    *("pin_memory", "non_blocking", "num_workers", "prefetch_factor", "persistent_workers"),
    *("copy_stream", "dataset_on_device"),
)

_OFF = RunConfig(optimizer_impl=OptimizerImpl.FOR_LOOP, channels_last=False)
PLAIN: dict[str, Any] = {name: getattr(_OFF, name) for name in LAB_SETTINGS}
"""Every setting off, as in a tutorial's first loop. set_to_none is what zero_grad() does."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A ready-made sweep; `build` returns its baseline and variants for a configuration."""

    label: str
    help: str
    build: Callable[[RunConfig, Devices], tuple[RunConfig, list[Variant]]]


_NO_SPEED = NOT_TIMED | {"set_to_none", "deterministic", "persistent_workers"}
"""Settings of PLAIN that are not for speed."""


def _tutorials(config: RunConfig, devices: Devices) -> tuple[RunConfig, list[Variant]]:
    baseline = replace(config, **PLAIN)
    fields = [field for field in PLAIN if field not in _NO_SPEED]
    return baseline, _variants(fields, baseline, devices)


def _loading(config: RunConfig, devices: Devices) -> tuple[RunConfig, list[Variant]]:
    baseline = replace(config, **{field: PLAIN[field] for field in _LOADING})
    found = _variants(_LOADING, baseline, devices)
    workers = min(4, max(2, granted_cores()))
    for extra in ({"prefetch_factor": 4}, {"persistent_workers": False}):
        found.append(make_variant({"num_workers": workers, **extra}, baseline, devices))
    return baseline, found


def _precision(config: RunConfig, devices: Devices) -> tuple[RunConfig, list[Variant]]:
    baseline = replace(config, precision=Precision.FP32)
    return baseline, _variants(("precision",), baseline, devices)


def _cpu_gpu(config: RunConfig, devices: Devices) -> tuple[RunConfig, list[Variant]]:
    baseline = replace(config, device="cpu", precision=Precision.FP32, **GPU_OFF)
    found = _variants(("device",), baseline, devices)
    if found:
        return baseline, found
    reasons = (device.reason for device in devices if device.reason is not None)
    reason = next(reasons, "torch finds no GPU in this machine")
    problem = issue("device", reason, "Run this sweep on a machine with a GPU")
    return baseline, [Variant(name="device=gpu", label="device GPU", changes={}, problem=problem)]


def _scaling(config: RunConfig, devices: Devices) -> tuple[RunConfig, list[Variant]]:
    """Compare one device with several, each with the same batch size, on a CPU with one thread."""
    on_cpu = config.device == "cpu"
    gpus = sum(device.cuda_index is not None and device.reason is None for device in devices)
    most = granted_cores() if on_cpu else gpus
    baseline = replace(
        config,
        strategy=Strategy.NONE,
        devices_per_node=1,
        runner=Runner.THREAD,
        cuda_graphs=False,
        num_threads=1 if on_cpu else config.num_threads,
    )
    ways = (Strategy.DDP, Strategy.FSDP) if on_cpu else (Strategy.DP, Strategy.DDP, Strategy.FSDP)
    found = [
        make_variant({"strategy": str(way), "devices_per_node": ranks}, baseline, devices)
        for ranks in _ranks(most)
        for way in ways
    ]
    possible = [variant for variant in found if variant.problem is None]
    two = {"strategy": str(Strategy.DDP), "devices_per_node": 2}
    return baseline, possible or [make_variant(two, baseline, devices)]


def _ranks(most: int) -> list[int]:
    """Return 2, 4, 8, … ranks and the maximum.

    >>> _ranks(6)
    [2, 4, 6]
    """
    return sorted({2, 4, 8, 16, 32, most} & {*range(2, most + 1)})


def _variants(fields: Sequence[str], baseline: RunConfig, devices: Devices) -> list[Variant]:
    return [
        make_variant({field: value}, baseline, devices)
        for field in fields
        for value in suggested(field, baseline, devices)
    ]


PRESETS: dict[str, Preset] = {
    "tutorials": Preset(
        "All settings",
        "Baseline: a plain tutorial loop with every setting off. Each variant turns one on.",
        _tutorials,
    ),
    "cpu_gpu": Preset(
        "CPU vs. GPU", "Baseline: CPU in FP32, compared with each GPU of this machine.", _cpu_gpu
    ),
    "loading": Preset(
        "Loading",
        "Baseline: loads in the training thread from pageable memory. Compared with "
        "workers, pinned memory and the other ways to feed the device.",
        _loading,
    ),
    "precision": Preset(
        "Precision", "Baseline: FP32, compared with every other precision.", _precision
    ),
    "scaling": Preset(
        "Scaling",
        "Baseline: one device, compared with DataParallel, DDP and FSDP on 2, 4, … "
        "devices. Each rank keeps its batch size; the samples of all ranks count.",
        _scaling,
    ),
}
