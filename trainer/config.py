"""What a run is asked to do: one frozen, checked value that crosses threads, URLs and JSON.

This module does not import torch: the page reads it before torch is loaded. What a *device*
can do with a configuration is judged in `trainer/config_validation.py`.
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
from typing import TYPE_CHECKING, Any

from stepscope.run.setting_names import EARLIER_FIELDS, EARLIER_IMPLS, current_settings


class Precision(StrEnum):
    """Arithmetic of the run.

    bf16 and fp16 are automatic mixed precision over fp32 weights; the pure ones keep weights,
    gradients and optimizer state in 16 bits too.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    PURE_BF16 = "pure_bf16"
    PURE_FP16 = "pure_fp16"


class CompileMode(StrEnum):
    """Mode of torch.compile, or `none` to run the model as it is written."""

    NONE = "none"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"


class Optimizer(StrEnum):
    """Optimizers on offer; `sgd` uses momentum 0.9."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"


class OptimizerImpl(StrEnum):
    """How the optimizer updates the weights: PyTorch's `foreach` and `fused`, or neither."""

    FUSED = "fused"
    FOREACH = "foreach"
    FOR_LOOP = "for-loop"


class LRSchedule(StrEnum):
    """How the learning rate changes after its warm-up.

    `none` keeps it constant, `plateau` halves it after an epoch when validation stalls, `cosine`
    lowers it to 0 over the steps of the run.
    """

    NONE = "none"
    PLATEAU = "plateau"
    COSINE = "cosine"


class Runner(StrEnum):
    """Where the loop runs: a thread of the page's process, a child process, or torchrun's ranks."""

    THREAD = "thread"
    PROCESS = "process"
    TORCHRUN = "torchrun"


class Strategy(StrEnum):
    """How several devices share the work.

    `dp` is DataParallel: one process with a copy of the model on each of `ranks` GPUs. `ddp` and
    `fsdp` (FSDP2, `fully_shard`) are one process a device, started by torchrun.
    """

    NONE = "none"
    DP = "dp"
    DDP = "ddp"
    FSDP = "fsdp"


class NanPolicy(StrEnum):
    """What a NaN or infinite loss does to the run."""

    STOP = "stop"
    CONTINUE = "continue"


class Workload(StrEnum):
    """The workloads; each has a file in `trainer/workloads/`, and `custom` runs one given to it."""

    LINEAR = "linear"
    DIGITS_MLP = "digits_mlp"
    DIGITS_CNN = "digits_cnn"
    IMAGES = "images"
    GPT = "gpt"
    RESNET = "resnet"
    MATMUL = "matmul"
    MEMORY_STRESS = "memory_stress"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """Why `field` cannot have its value, and what to do about it."""

    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}. {self.remedy}."


class ConfigError(ValueError):
    """A configuration that no device could run; carries the Problem."""

    def __init__(self, problem: ConfigIssue) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run. Raises ConfigError for values that no device could run."""

    workload: Workload = Workload.DIGITS_CNN
    device: str = "cpu"  # or a GPU's UUID: indices change with CUDA_VISIBLE_DEVICES
    precision: Precision = Precision.FP32
    epochs: int = 300
    batch_size: int = 128
    learning_rate: float = 5e-4
    optimizer: Optimizer = Optimizer.ADAM
    optimizer_impl: OptimizerImpl = OptimizerImpl.FUSED
    set_to_none: bool = True  # zero_grad frees the gradients, instead of filling them with zeros
    gradient_accumulation_steps: int = 1  # batches whose gradients make one optimizer step
    max_grad_norm: float = 0.0  # 0 is off
    activation_checkpointing: bool = False
    channels_last: bool = True
    cudnn_benchmark: bool = False
    deterministic: bool = False
    compile_mode: CompileMode = CompileMode.NONE
    cuda_graphs: bool = False
    kernel_warmup: bool = False  # some steps before the first one that counts; they change nothing
    preallocate_memory: bool = False
    seed: int = 0
    lr_scheduler: LRSchedule = LRSchedule.COSINE
    lr_warmup_steps: int = 0  # steps in which the learning rate rises linearly; 0 is off
    pin_memory: bool = False
    non_blocking: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2  # batches loaded ahead by each worker
    persistent_workers: bool = True
    copy_stream: bool = False  # copies to the GPU on a stream of their own
    dataset_on_device: bool = False  # the whole data set, copied once
    runner: Runner = Runner.THREAD
    strategy: Strategy = Strategy.NONE
    devices_per_node: int = 1  # batch_size is what one of them computes at once
    num_nodes: int = 1  # machines; more than one is started by hand, one command on each
    max_restarts: int = 0  # how often torchrun starts all ranks again after one has failed
    no_sync: bool = True  # gradients are averaged once a step, not for every batch of it
    static_graph: bool = False  # ddp: the same parameters get gradients in every step
    gradient_as_bucket_view: bool = False  # ddp: gradients lie in the buckets, uncopied
    bucket_cap_mb: int = 25  # ddp: MiB of gradients that are averaged together
    reshard_after_forward: bool = True  # fsdp: weights are freed after the forward pass
    cpu_offload: bool = False  # fsdp: weights, gradients and optimizer state lie on the host
    time_collectives: bool = False  # times every collective; it may lessen overlap
    nan_policy: NanPolicy = NanPolicy.STOP
    # Which workloads read the next ones: trainer/workload_traits.py.
    width: int = 32  # channels of the first stage or of each token; side of a matrix
    image_size: int = 32  # pixels a side
    num_layers: int = 2
    context_length: int = 64  # characters that the model reads at once
    num_classes: int = 10
    dropout: float = 0.0  # share of the activations set to 0 while training
    tie_embeddings: bool = True  # the head's weights are those of the embedding
    dataset: str = ""  # path of a data set, relative to the data folder
    horizontal_flip: bool = True  # half of the training images mirrored left to right, at random
    skip_unreadable: bool = False  # leave out images and rows that cannot be read; or end the run
    custom_options: str = ""  # the user's own settings that are on, with commas between
    num_threads: int = 0  # intra-op CPU threads; 0 is half the cores
    max_steps: int = 0  # optimizer steps after which the run ends; 0 is all epochs
    resume_from: str = ""  # "RUN_ID/best.pt", or nothing

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec.name, getattr(self, spec.name)))

    def has(self, name: str) -> bool:
        """Return True if the setting `name` of the user's own workload is on."""
        return name in self.custom_options.split(",")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, for `run.json`."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {key: str(v) if isinstance(v, StrEnum) else v for key, v in values.items()}

    if not TYPE_CHECKING:  # earlier names, which workload files of users read

        def __getattr__(self, name: str) -> Any:
            if name in EARLIER_IMPLS:
                return self.optimizer_impl == name
            if name in EARLIER_FIELDS:
                return getattr(self, EARLIER_FIELDS[name])
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def step_size(self) -> int:
        """Samples of one optimizer step, of all ranks together."""
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def distributed(self) -> bool:
        """Whether several processes train together, which torchrun starts."""
        return self.strategy in (Strategy.DDP, Strategy.FSDP)

    @property
    def world_size(self) -> int:
        """Processes that train together; DataParallel is one."""
        return self.devices_per_node * self.num_nodes if self.distributed else 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of `to_dict`, also with the names of earlier versions.

        Unknown keys are ignored, missing ones get their default.
        """
        values = current_settings(values)
        base = defaults(
            _checked("workload", values.get("workload", Workload.DIGITS_CNN)),
            _checked("device", values.get("device", "cpu")),
        )
        return replace(base, **{name: values[name] for name in FIELDS if name in values})

    def to_params(self) -> dict[str, str]:
        """The URL form: only what differs from the defaults of this workload on this device."""
        base = replace(
            defaults(self.workload, self.device), workload=Workload.DIGITS_CNN, device="cpu"
        )
        params: dict[str, str] = {}
        for name in FIELDS:
            value = getattr(self, name)
            if value != getattr(base, name):
                params[name] = str(int(value) if isinstance(value, bool) else value)
        return params

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> tuple[RunConfig, list[ConfigIssue]]:
        """A configuration from URL parameters, checked like any input.

        A value that cannot be used is reported and replaced by its default; unknown keys are
        ignored. Never raises.
        """
        params = current_settings(params)
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


# Inclusive bounds, also those of the sidebar's number fields.
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
    "num_nodes": (1, 1024),
    "max_restarts": (0, 100),
    "bucket_cap_mb": (1, 1024),
}

CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/(best|last|step-[0-9]{1,12})\.pt")
_PART = r"\w[\w .,+@=()-]{0,99}"  # neither hidden nor "..", and nothing that leads out of a folder
_OWN_NAME = r"[a-z][a-z0-9_]{0,39}"
# Form, constraint and remedy of the fields that hold text.
TEXTS: dict[str, tuple[re.Pattern[str], str, str]] = {
    "device": (
        re.compile(r"cpu|(GPU|MIG)-[0-9A-Za-z/-]{1,80}"),
        "must be cpu or a GPU's UUID",
        "Choose a device from the list",
    ),
    "dataset": (
        re.compile(rf"({_PART}(/{_PART}){{0,7}})?"),
        "must be a path inside the data folder, without '..' or hidden names",
        "Choose data from the list",
    ),
    "custom_options": (
        re.compile(rf"({_OWN_NAME}(,{_OWN_NAME}){{0,31}})?"),
        "must be comma-separated names of the workload's own options",
        "Use lowercase letters, digits and _",
    ),
    "resume_from": (
        re.compile(rf"({CHECKPOINT.pattern})?"),
        "must be RUN_ID/best.pt, last.pt or step-N.pt",
        "Choose a checkpoint",
    ),
}

# In the order of the sidebar.
FIELDS: tuple[str, ...] = tuple(spec.name for spec in fields(RunConfig))

# Sized for a laptop: the CNN trains for about a minute on two cores, the others for less.
_DEFAULTS: dict[Workload, dict[str, Any]] = {
    Workload.LINEAR: {
        "epochs": 400,
        "batch_size": 32,
        "learning_rate": 2e-4,
        "optimizer": Optimizer.SGD,
        "lr_scheduler": LRSchedule.NONE,
        "channels_last": False,
    },
    Workload.DIGITS_MLP: {"channels_last": False},
    Workload.DIGITS_CNN: {},
    Workload.IMAGES: {"epochs": 20, "batch_size": 64, "learning_rate": 1e-3, "dataset": "digits"},
    Workload.GPT: {
        "epochs": 3,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "optimizer": Optimizer.ADAMW,
        "channels_last": False,
        "width": 64,
    },
    Workload.RESNET: {
        "epochs": 1,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "width": 64,
        "image_size": 224,
    },
    Workload.MATMUL: {
        "epochs": 5,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "lr_scheduler": LRSchedule.NONE,
        "channels_last": False,
        "width": 512,
    },
    Workload.MEMORY_STRESS: {"epochs": 5, "batch_size": 16, "learning_rate": 1e-3},
    Workload.CUSTOM: {
        "epochs": 10,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "channels_last": False,
    },
}


def defaults(workload: Workload, device: str = "cpu") -> RunConfig:
    """The recommended configuration of a workload; on a GPU with pinned, overlapped copies."""
    on_gpu = device != "cpu"
    base = RunConfig(workload=workload, device=device, pin_memory=on_gpu, non_blocking=on_gpu)
    return replace(base, **_DEFAULTS[workload])


def checkpoints(root: Path) -> list[str]:
    """Every checkpoint in the run folders under `root`, as `resume` takes it, newest first."""
    found = []
    for path in root.glob("*/*.pt"):
        with contextlib.suppress(OSError):  # gone, or in a folder that cannot be read
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                found.append((info.st_mtime, path))
    names = [f"{path.parent.name}/{path.name}" for _, path in sorted(found, reverse=True)]
    return [name for name in names if CHECKPOINT.fullmatch(name)]


def _error(field: str, constraint: str, value: object, remedy: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ConfigError(ConfigIssue(field, f"{constraint}, got {shown}", remedy))


def _checked(name: str, value: Any) -> Any:
    """The value in its field's own type (JSON's int for a float, a string for an enum)."""
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
    if name in LIMITS:
        low, high = LIMITS[name]
        if not math.isfinite(value) or not low <= value <= high:
            raise _error(
                name, f"must be between {low:g} and {high:g}", value, "Choose a value in between"
            )
    if name in TEXTS:
        pattern, constraint, remedy = TEXTS[name]
        if not pattern.fullmatch(value):
            raise _error(name, constraint, value, remedy)
    return value


def _kind(name: str) -> type:
    """The type of a field, from its default."""
    return type(RunConfig.__dataclass_fields__[name].default)


def _parsed(name: str, text: str) -> Any:
    """A URL value as its field's type; `_checked` refuses the text that does not parse."""
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
    """Return names joined by commas and a last "or"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
