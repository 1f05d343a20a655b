"""RunConfig: all settings of a run, as a frozen and checked value for threads, URLs and JSON.

Does not import torch: the dashboard reads settings before torch is loaded. Whether a *device*
supports a configuration: `trainer/config_validation.py`.
"""

from __future__ import annotations

import contextlib
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue


class Precision(StrEnum):
    """bf16 and fp16 are AMP over fp32 weights; pure ones keep optimizer state in 16 bits too."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    PURE_BF16 = "pure_bf16"
    PURE_FP16 = "pure_fp16"


class CompileMode(StrEnum):
    """Mode of torch.compile; `none` runs the model uncompiled."""

    NONE = "none"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"


class Optimizer(StrEnum):
    """Supported optimizers; `sgd` has momentum 0.9."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"


class OptimizerImpl(StrEnum):
    """PyTorch's implementations of the optimizer step; for-loop is neither fused nor foreach."""

    FUSED = "fused"
    FOREACH = "foreach"
    FOR_LOOP = "for-loop"


class LRSchedule(StrEnum):
    """Learning rate after its warm-up: constant, halved on a plateau, or cosine decay to 0."""

    NONE = "none"
    PLATEAU = "plateau"
    COSINE = "cosine"


class Runner(StrEnum):
    """Where the loop runs: a thread of the server, a child process, or the ranks of torchrun."""

    THREAD = "thread"
    PROCESS = "process"
    TORCHRUN = "torchrun"


class Strategy(StrEnum):
    """DataParallel (one process, `devices_per_node` GPUs), DDP or FSDP2 (one rank per device)."""

    NONE = "none"
    DP = "dp"
    DDP = "ddp"
    FSDP = "fsdp"


class NanPolicy(StrEnum):
    """Action after a NaN or infinite loss."""

    STOP = "stop"
    CONTINUE = "continue"


class Workload(StrEnum):
    """The workloads, one file each in `trainer/workloads/`; `custom` runs the user's file."""

    LINEAR = "linear"
    DIGITS_MLP = "digits_mlp"
    DIGITS_CNN = "digits_cnn"
    IMAGES = "images"
    GPT = "gpt"
    RESNET = "resnet"
    MATMUL = "matmul"
    MEMORY_STRESS = "memory_stress"
    CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of a run. Raises ConfigError for values that no device could run."""

    workload: Workload = Workload.DIGITS_CNN
    device: str = "cpu"  # or a GPU's UUID: indices change with CUDA_VISIBLE_DEVICES
    precision: Precision = Precision.FP32
    epochs: int = 300
    batch_size: int = 128
    learning_rate: float = 5e-4
    optimizer: Optimizer = Optimizer.ADAM
    optimizer_impl: OptimizerImpl = OptimizerImpl.FUSED
    set_to_none: bool = True  # zero_grad frees the gradients instead of zeroing them
    gradient_accumulation_steps: int = 1  # micro-batches of one optimizer step
    max_grad_norm: float = 0.0  # 0 is off
    activation_checkpointing: bool = False
    channels_last: bool = True
    cudnn_benchmark: bool = False
    deterministic: bool = False
    compile_mode: CompileMode = CompileMode.NONE
    cuda_graphs: bool = False
    kernel_warmup: bool = False  # uncounted steps before the first one; the weights are restored
    preallocate_memory: bool = False
    seed: int = 0
    lr_scheduler: LRSchedule = LRSchedule.COSINE
    lr_warmup_steps: int = 0  # optimizer steps of linear learning-rate warm-up; 0 is off
    pin_memory: bool = False
    non_blocking: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2  # batches that each worker loads ahead
    persistent_workers: bool = True
    copy_stream: bool = False  # H2D copies on a side stream
    dataset_on_device: bool = False  # the whole dataset, copied once
    runner: Runner = Runner.THREAD
    strategy: Strategy = Strategy.NONE
    devices_per_node: int = 1  # batch_size is the micro-batch of one device
    cpu_offload: bool = False  # fsdp: weights, gradients and optimizer state in host memory
    nan_policy: NanPolicy = NanPolicy.STOP
    # Workloads that read the following fields: TRAITS in trainer/config_validation.py.
    width: int = 32  # channels of the first stage, embedding size, or side of a matrix
    image_size: int = 32  # pixels per side
    num_layers: int = 2
    context_length: int = 64  # characters
    num_classes: int = 10
    dropout: float = 0.0  # probability
    dataset: str = ""  # path relative to the data folder
    horizontal_flip: bool = True  # mirrors half of the training images at random
    custom_options: str = ""  # comma-separated options of the custom workload that are on
    num_threads: int = 0  # intra-op CPU threads; 0 is half the cores
    max_steps: int = 0  # optimizer steps after which the run ends; 0 is all epochs
    resume_from: str = ""  # "RUN_ID/best.pt", or empty

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec.name, getattr(self, spec.name)))

    def has(self, name: str) -> bool:
        return name in self.custom_options.split(",")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, for `run.json`."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @property
    def step_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def distributed(self) -> bool:
        """Whether torchrun starts several ranks."""
        return self.strategy in (Strategy.DDP, Strategy.FSDP)

    @property
    def world_size(self) -> int:
        """Number of ranks; DataParallel has one."""
        return self.devices_per_node if self.distributed else 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return a configuration from the output of `to_dict`.

        Ignores unknown keys and fills in defaults. Raises ConfigError.
        """
        base = defaults(
            _checked("workload", values.get("workload", Workload.DIGITS_CNN)),
            _checked("device", values.get("device", "cpu")),
        )
        return replace(base, **{name: values[name] for name in FIELDS if name in values})

    def to_params(self) -> dict[str, str]:
        """Return URL parameters: the differences from the defaults of this workload and device."""
        base = replace(
            defaults(self.workload, self.device), workload=Workload.DIGITS_CNN, device="cpu"
        )
        values = {name: getattr(self, name) for name in FIELDS}
        return {
            name: str(int(value) if isinstance(value, bool) else value)
            for name, value in values.items()
            if value != getattr(base, name)
        }

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> tuple[RunConfig, list[ConfigIssue]]:
        """Return the configuration of URL parameters, and issues of values that become defaults."""
        problems: list[ConfigIssue] = []
        chosen: dict[str, Any] = {}
        for name in FIELDS:
            if name in params:
                try:
                    chosen[name] = _checked(name, _parsed(name, params[name]))
                except ConfigError as error:
                    problems.append(error.problem)
        base = defaults(chosen.get("workload", Workload.DIGITS_CNN), chosen.get("device", "cpu"))
        return replace(base, **chosen), problems


# Inclusive bounds, which the number fields of the sidebar share.
LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, 100_000),
    "batch_size": (1, 65_536),
    "learning_rate": (1e-8, 100.0),
    "lr_warmup_steps": (0, 10**6),
    "max_grad_norm": (0.0, 1e6),
    "seed": (0, 2**31 - 1),
    "num_workers": (0, 64),
    "prefetch_factor": (1, 64),
    "width": (8, 16_384),  # below 8 channels oneDNN may write past a buffer: docs/training.md
    "image_size": (8, 1024),
    "num_threads": (0, 256),
    "gradient_accumulation_steps": (1, 1024),
    "max_steps": (0, 10**9),
    "num_layers": (1, 96),
    "context_length": (8, 4096),
    "num_classes": (2, 10_000),
    "dropout": (0.0, 0.9),
    "devices_per_node": (1, 64),
}

CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/(best|last|step-[0-9]{1,12})\.pt")
_PART = r"\w[\w .,+@=()-]{0,99}"  # neither hidden nor ".."
OPTION_NAME = r"[a-z][a-z0-9_]{0,39}"
# Pattern, constraint and remedy of the text fields.
TEXTS: dict[str, tuple[str, str, str]] = {
    "device": (
        r"cpu|(GPU|MIG)-[0-9A-Za-z/-]{1,80}",
        "must be cpu or a GPU's UUID",
        "Choose a device from the list",
    ),
    "dataset": (
        rf"({_PART}(/{_PART}){{0,7}})?",
        "must be a path inside the data folder, without '..' or hidden names",
        "Choose data from the list",
    ),
    "custom_options": (
        rf"({OPTION_NAME}(,{OPTION_NAME}){{0,31}})?",
        "must be comma-separated names of the workload's options",
        "Use lowercase letters, digits and _",
    ),
    "resume_from": (
        rf"({CHECKPOINT.pattern})?",
        "must be RUN_ID/best.pt, last.pt or step-N.pt",
        "Choose a checkpoint",
    ),
}

# In the order of the sidebar.
FIELDS: tuple[str, ...] = tuple(spec.name for spec in fields(RunConfig))

# Sized for a laptop: the CNN trains for about a minute on two cores, the others for less.
_SMALL: dict[str, Any] = dict(learning_rate=1e-3, batch_size=8, epochs=5)
_NO_IMAGES: dict[str, Any] = dict(channels_last=False)
_DEFAULTS: dict[Workload, dict[str, Any]] = {
    Workload.LINEAR: _NO_IMAGES
    | dict(epochs=400, batch_size=32, learning_rate=2e-4)
    | dict(optimizer=Optimizer.SGD, lr_scheduler=LRSchedule.NONE),
    Workload.DIGITS_MLP: _NO_IMAGES,
    Workload.DIGITS_CNN: {},
    Workload.IMAGES: _SMALL | dict(epochs=20, batch_size=64, dataset="digits"),
    Workload.GPT: _SMALL
    | _NO_IMAGES
    | dict(epochs=3, batch_size=16, optimizer=Optimizer.ADAMW, width=64),
    Workload.RESNET: _SMALL | dict(epochs=1, width=64, image_size=224),
    Workload.MATMUL: _SMALL | _NO_IMAGES | dict(lr_scheduler=LRSchedule.NONE, width=512),
    Workload.MEMORY_STRESS: _SMALL | dict(batch_size=16),
    Workload.CUSTOM: _SMALL | _NO_IMAGES | dict(epochs=10, batch_size=32),
}


def defaults(workload: Workload, device: str = "cpu") -> RunConfig:
    """Return the recommended configuration of a workload; on a GPU with pinned, async copies."""
    on_gpu = device != "cpu"
    base = RunConfig(workload=workload, device=device, pin_memory=on_gpu, non_blocking=on_gpu)
    return replace(base, **_DEFAULTS[workload])


def checkpoints(root: Path) -> list[str]:
    """Return the checkpoints of all run folders in `root` as "RUN_ID/best.pt", newest first."""
    found = []
    for path in root.glob("*/*.pt"):
        with contextlib.suppress(OSError):  # deleted meanwhile, or no permission
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                found.append((info.st_mtime, path))
    names = [f"{path.parent.name}/{path.name}" for _, path in sorted(found, reverse=True)]
    return [name for name in names if CHECKPOINT.fullmatch(name)]


def _error(field: str, constraint: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(ConfigIssue(field, f"{constraint}, got {value!r:.60}", remedy))


def _checked(name: str, value: Any) -> Any:
    """Return the value in the type of its field. Raises ConfigError."""
    kind = _kind(name)
    if issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            options = ", ".join(kind)
            raise _error(name, f"must be one of {options}", value, "Choose one of these") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    is_kind = type(value) is kind  # not isinstance: True is no batch size
    if not is_kind:
        wanted = {int: "an integer", float: "a number", bool: "0 or 1"}.get(kind, "text")
        raise _error(name, f"must be {wanted}", value, f"Give {wanted}")
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    if name in LIMITS and not low <= value <= high:  # also False for NaN
        constraint = f"must be between {low:g} and {high:g}"
        raise _error(name, constraint, value, "Choose a value in between")
    if name in TEXTS:
        pattern, constraint, remedy = TEXTS[name]
        if not re.fullmatch(pattern, value):
            raise _error(name, constraint, value, remedy)
    return value


def _kind(name: str) -> type:
    return type(RunConfig.__dataclass_fields__[name].default)


def _parsed(name: str, text: str) -> Any:
    """Convert a URL value to the type of its field; returns invalid text unchanged."""
    kind = _kind(name)
    if kind is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    if kind in (int, float) and re.fullmatch(r"[-+0-9.eEinfaN]{1,32}", text):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def either(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
