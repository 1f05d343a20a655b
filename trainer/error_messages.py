"""Describes the exception that ended a run: cause and remedy in a sentence. Pure."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepscope.common.formatting import summary_line
from stepscope.run.status import MemoryShortage, RunOutcome, failed, out_of_memory, shortage
from trainer.config import SETTINGS, Precision, RunConfig, Runner, Workload, limits_of, reads
from trainer.config_validation import TrainDevice, choice_problem
from trainer.custom_workload import place_in_user_code
from trainer.setting import either


class RunFailedError(Exception):
    """An expected failure of a run; its message is complete without a traceback."""


class NonFiniteLossError(RunFailedError):
    """The loss is NaN or infinite."""


SHARED_MEMORY_REASON = (
    "A data-loading worker ran out of shared memory. "
    "Set num_workers to 0 or give the machine a larger /dev/shm."
)
_NO_WORKSPACE = "unable to find an engine"  # cuDNN, if no convolution's workspace fits
_GPU_CALL = ("CUDA error", "cuDNN error", "CUDNN_STATUS", "CUBLAS_STATUS", "cuBLAS error")
_SHARED_MEMORY = ("/torch_", "shared memory", "bus error")
_SIZES = ("batch_size", "image_size", "context_length", "num_layers", "width")
_TAKES = {
    MemoryShortage.GPU: _SIZES,
    MemoryShortage.HOST: (*_SIZES, "num_workers"),
    MemoryShortage.PINNED: ("batch_size", "image_size"),
}


def describe_failure(
    error: BaseException,
    config: RunConfig,
    device: TrainDevice | None = None,
    lost: str | None = None,
) -> RunOutcome:
    """Return the outcome of a run for an exception; `lost` is the error of an unusable GPU."""
    if lost is not None:
        remedy = "Start again: each run has a process of its own"
        if config.runner is Runner.THREAD:
            remedy = "Restart the server, or run in a separate process"
        return replace(failed(f"The GPU failed: {lost}. {remedy}."), fatal=True)
    text = str(error)
    if isinstance(error, RunFailedError):
        return failed(text)
    first = summary_line(text).rstrip(".")
    short = MemoryShortage.GPU if _NO_WORKSPACE in text else shortage(error)
    if isinstance(error, RuntimeError) and "DataLoader worker" in text:
        if any(word in text for word in _SHARED_MEMORY):
            return failed(SHARED_MEMORY_REASON)
        if text.startswith("DataLoader worker"):
            return failed(
                "A DataLoader worker died. Start again; if it recurs, set num_workers to 0 and "
                "check host memory."
            )
    if short is not None:
        return out_of_memory(short, error, f"{_less_memory(short, config, device)}.")
    if isinstance(error, torch.AcceleratorError) or any(word in first for word in _GPU_CALL):
        return failed(
            f"A GPU call failed: {first[:300]}. The GPU still responds: start again, and check "
            "the traceback if it recurs."
        )
    place = place_in_user_code(error) if config.workload is Workload.CUSTOM else None
    at = f" at {place}" if place else ""
    return failed(f"Training raised {type(error).__name__}{at}: {first[:300]}. See the traceback.")


def nan_remedy(config: RunConfig) -> str:
    """Return settings to change for a finite loss, as a clause."""
    ways = ["lower the learning rate"]
    if not config.max_grad_norm:
        ways.append("set a max gradient norm")
    if config.precision in (Precision.FP16, Precision.PURE_FP16):
        ways.append(f"choose fp32 instead of {config.precision}")
    return either(ways).capitalize()


def _less_memory(short: MemoryShortage, config: RunConfig, device: TrainDevice | None) -> str:
    """Return settings to change for less memory of this kind, as a clause."""
    lower = [
        SETTINGS[name].label.lower()
        for name in _TAKES[short]
        if getattr(config, name) > limits_of(name)[0] and reads(config.workload, name)
    ]
    ways = [f"lower {either(lower)}"] if lower else []
    if short is MemoryShortage.PINNED:
        ways.append("switch off pin_memory, non_blocking copies and the side stream")
    elif short is MemoryShortage.GPU or config.device == "cpu":
        if device is not None and config.precision in (Precision.FP32, Precision.TF32):
            for shorter in (Precision.BF16, Precision.FP16):
                if not choice_problem("precision", shorter, config, [device]):
                    ways.append(f"choose {shorter}")
                    break
        if config.dataset_on_device:
            ways.append("switch off the dataset on the device")
    text = ", or ".join(ways) or "Choose a device with more memory"
    return text[0].upper() + text[1:]
