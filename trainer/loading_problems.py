"""Which settings of loading and copying cannot be, or have no effect. Pure; no torch import."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import Problem, RunConfig
from trainer.workload_traits import TRAITS


def loading_problems(config: RunConfig, *, on_gpu: bool) -> list[Problem]:
    """Every reason why batches cannot be loaded with these settings, or come as without one."""
    return [
        *(_copy_problems(config) if on_gpu else _on_a_cpu(config)),
        *(() if config.num_workers else _without_workers(config)),
    ]


def _on_a_cpu(config: RunConfig) -> Iterator[Problem]:
    reasons = {
        "pin_memory": "page-locked memory serves copies to a GPU",
        "non_blocking": "on a CPU there is no copy to overlap",
        "copy_stream": "on a CPU there is no copy to overlap",
    }
    if not TRAITS[config.workload].decodes:
        reasons["data_on_device"] = "on a CPU the data are in its memory already"
    for field, reason in reasons.items():
        if getattr(config, field):
            yield Problem(field, reason, "Switch it off")
    if config.data_on_device and config.num_workers:
        reason = "workers decode in processes of their own"
        yield Problem("data_on_device", reason, "Set num_workers to 0")


def _copy_problems(config: RunConfig) -> Iterator[Problem]:
    for field in ("non_blocking", "copy_stream"):
        if getattr(config, field) and not config.pin_memory:
            reason = "only copies from pinned memory overlap"
            yield Problem(field, reason, "Switch on pin_memory")
    if not config.data_on_device:
        return
    # pin_memory and non_blocking may stay on, as they are by default: they do nothing then.
    if config.copy_stream:
        reason = "with data_on_device no batch is copied"
        yield Problem("copy_stream", reason, "Switch off copy_stream or data_on_device")
    if config.num_workers:
        reason = "workers load batches outside of the GPU"
        yield Problem("data_on_device", reason, "Set num_workers to 0")
    if TRAITS[config.workload].decodes:
        reason = f"{config.workload} reads each sample from a file when it is needed"
        yield Problem("data_on_device", reason, "Switch it off")


def _without_workers(config: RunConfig) -> Iterator[Problem]:
    if config.prefetch_factor != _DEFAULT_PREFETCH:
        yield Problem("prefetch_factor", "only workers load ahead", "Set num_workers above 0")
    if not config.persistent_workers:
        reason = "there are no workers that could end with each epoch"
        yield Problem("persistent_workers", reason, "Switch it on, or set num_workers above 0")


_DEFAULT_PREFETCH = RunConfig().prefetch_factor
