"""A sweep.json as the lab writes it, in the middle of a sweep and at its end."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from trainer.config import RunConfig, Workload

Json = dict[str, Any]


def metrics(rate: float, **others: float | None) -> Json:
    of_gpu = ("h2d", "gpu_time", "peak_allocated", "peak_reserved", "energy_per_sample", "mfu")
    values: Json = dict.fromkeys(of_gpu)
    values |= {"samples_per_sec": rate, "step_time": 128 / rate, "data_wait": 0.001}
    return values | {"peak_process": 512 * 2**20, "loss": 0.5} | others


def variant(name: str, verdict: str, effect: float | None = None, **others: Any) -> Json:
    known = effect is not None
    return {
        "name": name,
        "label": f"{name} on",
        "changes": {name: True},
        "verdict": verdict,
        "effect": effect,
        "low": effect - 0.02 if effect is not None else None,
        "high": effect + 0.02 if effect is not None else None,
        "resolution": 0.02 if known else None,
        "rounds": 5 if known else 0,
        "reason": None,
        "text": None,
        "metrics": metrics(10_000 * (1 + (effect or 0.0))) if known else {},
        "loss": {"verdict": "same", "text": "same loss"} if known else {},
    } | others


VARIANTS = [
    variant("deterministic", "slower", -0.2),
    variant("channels_last", "no_difference", 0.004),
    variant("compile", "faster", 0.31),
    variant("num_workers", "undecided", 0.02),
    variant("cuda_graphs", "impossible", reason="CUDA Graphs need a GPU. Choose another device."),
    variant("precision", "failed", reason="RuntimeError: <b>out</b> of everything"),
]


def sweep(status: str = "finished", **others: Any) -> Json:
    """Return a sweep over VARIANTS on a CPU with these entries instead of its own."""
    return {
        "schema": 1,
        "id": "20261122-061500-digits-mlp-ab12",
        "status": status,
        "reason": None,
        "created": 1_795_000_000.0,
        "updated": 1_795_000_060.0,
        "workload": "digits_mlp",
        "plan": {
            "config": RunConfig(workload=Workload.DIGITS_MLP, channels_last=False).to_dict(),
            "variants": [{k: a[k] for k in ("name", "label", "changes")} for a in VARIANTS],
            "steps": 200,
            "warmup": 20,
            "max_rounds": 12,
            "looks": [5, 8, 12],
            "find_best": True,
        },
        "progress": {
            "done": 17,
            "total": 96,
            "round": 3,
            "doing": "round 3 of 12: channels_last",
            "seconds_left": 341.0,
            "phase": "variants",
        },
        "baseline": {"name": "baseline", "label": "digits_mlp on CPU, fp32", "rounds": 5}
        | {"metrics": metrics(10_000.0)},
        "variants": deepcopy(VARIANTS),  # tests change them
        "best": None,
        "left_out": {},
        "throttled": None,
        "machine": {"device": "CPU", "cpu": "Some CPU", "torch": "2.13.0"},
    } | others


BEST = {
    "variants": ["compile"],
    "changes": {"compile_mode": "default"},
    "verdict": "faster",
    "effect": 0.3,
    "low": 0.27,
    "high": 0.33,
    "resolution": 0.02,
    "rounds": 5,
    "text": "faster by 30.0 % [27.0, 33.0]",
    "reason": None,
}
