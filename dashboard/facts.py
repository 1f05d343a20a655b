"""What the charts of a run depend on, from its run.json; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboard.charts import NO_ALLOCATOR, NO_GPU, Fit, Gpu, RunFacts
from stepscope.run import RunInfo


def run_facts(run: RunInfo) -> RunFacts:
    """Return the layout's inputs; what the file lacks or holds in another form is left out."""
    device = _dict(run.facts.get("config")).get("device", "cpu")
    capabilities = _dict(run.facts.get("capabilities"))
    return RunFacts(
        has_cuda=device != "cpu",
        gpus=tuple(_gpus(run.facts.get("devices"))),
        training_gpu=None if device == "cpu" else str(device),
        gpu_reason=str(capabilities.get("nvml") or NO_GPU),
        allocator_reason=NO_ALLOCATOR if device == "cpu" else str(capabilities.get("allocator")),
        fit=_fit(_dict(run.facts.get("fit"))),
    )


def _gpus(devices: Any) -> list[Gpu]:
    entries = devices if isinstance(devices, list) else []
    return [
        Gpu(uuid=str(entry["uuid"]), name=str(entry.get("name")),
            memory_bytes=entry.get("memory_total"))
        for entry in map(_dict, entries) if "uuid" in entry
    ]  # fmt: skip


def _fit(fit: Mapping[str, Any]) -> Fit | None:
    try:
        return Fit(
            x=tuple(map(float, fit["x"])), y=tuple(map(float, fit["y"])),
            slope=float(fit["slope"]), intercept=float(fit["intercept"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
