"""Lists the CPU and all CUDA devices. Initializes CUDA, but creates no context.

A GPU is identified by its NVML UUID, as its index in torch depends on CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings

import psutil
import torch

from stepscope.common.json_values import first_line
from stepscope.gpu.source import nvml_uuid
from stepscope.host.environment import cpu_name, granted_cores
from trainer.training.config_validation import TrainDevice

_TRITON_SINCE = (7, 0)  # compute capability: `has_triton` of torch/utils/_triton.py


def list_devices() -> list[TrainDevice]:
    """Return usable GPUs by descending memory, then the CPU, then unusable GPUs."""
    gpus = [] if cuda_reason() else [_gpu(i) for i in range(torch.cuda.device_count())]
    gpus.sort(key=lambda gpu: (gpu.memory_total, gpu.compute_capability or (0, 0)), reverse=True)
    usable = [gpu for gpu in gpus if gpu.reason is None]
    return [*usable, _cpu(), *(gpu for gpu in gpus if gpu.reason is not None)]


def cuda_reason() -> str | None:
    """Return why torch has no CUDA device, with a remedy; None if it has one."""
    version = torch.__version__
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {version} is a CPU-only build. "
            "Install a CUDA build of torch to train on an NVIDIA GPU."
        )
    error: str | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns of a driver that is too old or not loaded
        available = torch.cuda.is_available()
        if available:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]  # without a context
            except (RuntimeError, torch.cuda.DeferredCudaCallError) as failed:
                error = first_line(failed).rstrip(".")
    if available and error is None:
        return None
    messages = [str(warning.message).split(" (Triggered")[0] for warning in caught]
    detail = error or next(iter(messages), "found no NVIDIA driver")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() == "":
        return "CUDA_VISIBLE_DEVICES is empty, which hides every GPU. Unset it and restart."
    return (
        f"torch {version} (CUDA {torch.version.cuda}) cannot use a GPU: {detail}. "
        "Check that nvidia-smi works on this machine."
    )


def _gpu(index: int) -> TrainDevice:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return TrainDevice(
        id=gpu_uuid(index),
        name=properties.name,
        memory_total=properties.total_memory,
        cuda_index=index,
        compute_capability=capability,
        reason=_build_reason(capability, torch.cuda.get_arch_list()),
        compile_reason=_triton_reason(capability),
    )


def gpu_uuid(index: int) -> str:
    """Return the UUID of torch's device `index` in NVML's form; torch omits the prefix."""
    properties = torch.cuda.get_device_properties(index)
    return nvml_uuid(str(properties.uuid), properties.name)


def _build_reason(capability: tuple[int, int], arch_list: list[str]) -> str | None:
    """Return why kernels for `arch_list` ("sm_90", "compute_90") do not run; None if they do."""
    major, minor = capability
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        built = int("".join(filter(str.isdigit, digits)) or 0)
        same_major = built // 10 == major and built % 10 <= minor
        # The driver compiles PTX ("compute_…") for any later GPU.
        if (kind == "sm" and same_major) or (kind == "compute" and built <= major * 10 + minor):
            return None
    if not arch_list:
        return None
    return (
        f"torch {torch.__version__} has kernels for {', '.join(arch_list)}; this GPU is "
        f"sm_{major}{minor}"
    )


def _cpu() -> TrainDevice:
    cores = granted_cores()
    return TrainDevice(
        id="cpu",
        name=f"{cpu_name()} ({cores} core{'s' if cores > 1 else ''})",
        memory_total=psutil.virtual_memory().total,
        compile_reason=_compiler_reason("C++", os.environ.get("CXX", "g++")),
    )


def _triton_reason(capability: tuple[int, int]) -> str | None:
    """Return why torch.compile cannot generate Triton kernels for a GPU; None if it can."""
    if capability < _TRITON_SINCE:
        needed, found = (f"{major}.{minor}" for major, minor in (_TRITON_SINCE, capability))
        return f"torch.compile needs compute capability {needed}, this GPU has {found}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton for GPU kernels, and the package triton is not installed"
    return _compiler_reason("C", os.environ.get("CC", "gcc"), "clang")


def _compiler_reason(language: str, *commands: str) -> str | None:
    """Return why torch.compile cannot compile its code; None if a compiler is installed."""
    if any(map(shutil.which, commands)):
        return None
    missing = " or ".join(commands)
    return f"torch.compile needs a {language} compiler; {missing} not found"
