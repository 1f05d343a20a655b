"""Finds the devices that torch can train on: the CPU and every CUDA device, best first.

A GPU is known by its UUID, the same string that NVML prints; torch's index changes with
CUDA_VISIBLE_DEVICES. Asking for CUDA devices initializes CUDA but makes no context.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings

import psutil
import torch

from stepscope.gpu.source import nvml_uuid
from stepscope.host.environment import cpu_name
from trainer.config_validation import TrainDevice

_TRITON_SINCE = (7, 0)
"""Least compute capability of torch.compile: `has_triton` of torch/utils/_triton.py."""


def list_devices() -> list[TrainDevice]:
    """Usable GPUs with the most memory first, then the CPU, then GPUs that torch cannot use."""
    gpus = [] if cuda_reason() else [_gpu(i) for i in range(torch.cuda.device_count())]
    gpus.sort(key=lambda gpu: (gpu.memory_total, gpu.compute_capability or (0, 0)), reverse=True)
    usable = [gpu for gpu in gpus if gpu.reason is None]
    return [*usable, _cpu(), *(gpu for gpu in gpus if gpu.reason is not None)]


def cuda_reason() -> str | None:
    """Why this torch offers no CUDA device, in a sentence with what to do; None when it does."""
    version = torch.__version__
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {version} is a CPU-only build. "
            "Install a CUDA build of torch to train on an NVIDIA GPU."
        )
    with warnings.catch_warnings(record=True) as caught:
        # torch says here what is wrong with the driver (too old, mismatched, not loaded).
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        refusal = _start_cuda() if available else None
    if available and refusal is None:
        return None
    said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
    detail = refusal or next(iter(said), "found no NVIDIA driver")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides every GPU. Unset it and restart."
    return (
        f"torch {version} (CUDA {torch.version.cuda}) cannot use a GPU: {detail}. "
        "Check that nvidia-smi works on this machine."
    )


def _start_cuda() -> str | None:
    """Start CUDA, which makes no context yet; return what it says if it refuses."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return None


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
        connection_reason=_connection_reason("NCCL", "GPUs"),
    )


def gpu_uuid(index: int) -> str:
    """The UUID of torch's device `index` as NVML prints it; torch leaves out the prefix."""
    properties = torch.cuda.get_device_properties(index)
    return nvml_uuid(str(properties.uuid), properties.name)


def _build_reason(capability: tuple[int, int], arch_list: list[str]) -> str | None:
    """Why kernels built for `arch_list` ("sm_90", "compute_90") do not run on this capability."""
    major, minor = capability
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        built = int("".join(filter(str.isdigit, digits)) or 0)
        same_major = built // 10 == major and built % 10 <= minor
        # PTX ("compute_…") is compiled by the driver for any later GPU.
        if (kind == "sm" and same_major) or (kind == "compute" and built <= major * 10 + minor):
            return None
    if not arch_list:
        return None
    return (
        f"torch {torch.__version__} has kernels for {', '.join(arch_list)}; this GPU is "
        f"sm_{major}{minor}"
    )


def _cpu() -> TrainDevice:
    cores = os.cpu_count() or 1
    return TrainDevice(
        id="cpu",
        name=f"{cpu_name()} ({cores} core{'s' if cores > 1 else ''})",
        memory_total=psutil.virtual_memory().total,
        compile_reason=_compiler_reason("C++", os.environ.get("CXX", "g++")),
        connection_reason=_connection_reason("gloo", "CPUs"),
    )


def _connection_reason(backend: str, devices: str) -> str | None:
    """Why ranks on such devices cannot exchange gradients; None where they can."""
    if not torch.distributed.is_available():
        return f"torch {torch.__version__} was built without torch.distributed"
    if torch.distributed.is_backend_available(backend.lower()):
        return None
    return f"torch {torch.__version__} was built without {backend}, which connects {devices}"


def _triton_reason(capability: tuple[int, int]) -> str | None:
    """Why torch.compile cannot make kernels for a GPU: it writes them in Triton, for sm_70 on."""
    if capability < _TRITON_SINCE:
        needed, found = (f"{major}.{minor}" for major, minor in (_TRITON_SINCE, capability))
        return f"torch.compile needs compute capability {needed}, this GPU has {found}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton for GPU kernels, and the package triton is not installed"
    return _compiler_reason("C", os.environ.get("CC", "gcc"), "clang")


def _compiler_reason(language: str, *commands: str) -> str | None:
    """Why torch.compile cannot build what it writes; None where one of the compilers is there."""
    if any(map(shutil.which, commands)):
        return None
    missing = " or ".join(commands)
    return f"torch.compile needs a {language} compiler; {missing} not found"
