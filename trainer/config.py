"""RunConfig: every setting of a run, declared once, as a frozen and checked value.

The declaration of a field has its default, label and help, its limits, the sidebar's group, and
the workloads that read it: sidebar, URL, lab and messages take them from SETTINGS. Does not import
torch: the dashboard reads settings before torch is loaded. What cannot be combined, and what a
device does not support: `trainer/training/config_validation.py`.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.setting import check, setting, settings_of


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
    """Learning rate after its warm-up: constant, or cosine decay to 0."""

    NONE = "none"
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
    """The workloads of `trainer/workloads/`; `custom` runs the user's file."""

    LINEAR = "linear"
    DIGITS_MLP = "digits_mlp"
    DIGITS_CNN = "digits_cnn"
    IMAGES = "images"
    GPT = "gpt"
    RESNET = "resnet"
    MEMORY_STRESS = "memory_stress"
    CUSTOM = "custom"


# The sidebar's groups, collapsed until they are needed.
TRAINING, PERFORMANCE, LOADING = "Training", "Performance", "Data loading"
DISTRIBUTED, ADVANCED = "Distributed", "Advanced"
GROUPS = (TRAINING, PERFORMANCE, LOADING, DISTRIBUTED, ADVANCED)

CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/(best|last|step-[0-9]{1,12})\.pt")
_PART = r"\w[\w .,+@=()-]{0,99}"  # neither hidden nor ".."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of a run. Raises ConfigError for values that no device could run."""

    workload: Workload = setting(
        Workload.DIGITS_CNN,
        "Workload",
        "Selecting a workload loads its recommended epochs, batch size and learning rate.",
        choices={
            Workload.LINEAR: "Linear regression (1 → 1)",
            Workload.DIGITS_MLP: "Digits, MLP (real data)",
            Workload.DIGITS_CNN: "Digits, small CNN (real data)",
            Workload.IMAGES: "Your images (small CNN)",
            Workload.GPT: "Character-level GPT (real text)",
            Workload.RESNET: "ResNet-18, 224 px (synthetic)",
            Workload.MEMORY_STRESS: "GPU memory stress test",
            Workload.CUSTOM: "Custom workload",
        },
    )
    device: str = setting(  # an index would change with CUDA_VISIBLE_DEVICES
        "cpu",
        "Device",
        "The CPU and all CUDA devices, best first. GPUs are identified by UUID.",
        pattern=r"cpu|(GPU|MIG)-[0-9A-Za-z/-]{1,80}",
        constraint="cpu or a GPU's UUID",
    )
    precision: Precision = setting(
        Precision.FP32,
        "Precision",
        "TF32, BF16 and FP16 run on tensor cores; 16-bit types also halve memory traffic. AMP "
        "keeps weights in FP32, pure 16-bit does not. No gain if the model is input-bound or "
        "launch-bound; pure 16-bit may fail to converge.",
        choices={
            Precision.FP32: "fp32",
            Precision.TF32: "tf32",
            Precision.BF16: "bf16 AMP",
            Precision.FP16: "fp16 AMP",
            Precision.PURE_BF16: "pure bf16",
            Precision.PURE_FP16: "pure fp16",
        },
        in_lab=True,
    )
    batch_size: int = setting(
        128, "Batch size", "Samples per forward pass, on each rank.", limits=(1, 65_536)
    )
    learning_rate: float = setting(
        5e-4, "Learning rate", "The optimizer's initial learning rate.", limits=(1e-8, 100.0)
    )
    epochs: int = setting(300, "Epochs", "Passes over the training data.", limits=(1, 100_000))
    optimizer: Optimizer = setting(
        Optimizer.ADAM,
        "Optimizer",
        "SGD uses momentum 0.9.",
        choices={Optimizer.SGD: "SGD", Optimizer.ADAM: "Adam", Optimizer.ADAMW: "AdamW"},
    )
    num_layers: int = setting(
        2,
        "Layers",
        "Transformer blocks; memory and time grow with them.",
        limits=(1, 96),
        read_by=(Workload.GPT,),
    )
    width: int = setting(  # channels of the first stage, or embedding size
        32,
        "Width",
        "Embedding size; memory grows with it.",
        limits=(8, 16_384),  # below 8 channels oneDNN may write past a buffer: docs/training.md
        read_by=(Workload.GPT, Workload.RESNET, Workload.MEMORY_STRESS),
    )
    context_length: int = setting(
        64,
        "Context",
        "Characters the model sees at once; memory grows with it.",
        limits=(8, 4096),
        read_by=(Workload.GPT,),
    )
    dropout: float = setting(
        0.0,
        "Dropout",
        "Share of activations zeroed during training; 0 is off.",
        limits=(0.0, 0.9),
        read_by=(Workload.GPT,),
    )
    dataset: str = setting(
        "",
        "Data",
        "Datasets in the data folder: CSV files with path,label, or one folder per class. Set "
        "STEPSCOPE_DATA before starting the server to choose another folder.",
        pattern=rf"({_PART}(/{_PART}){{0,7}})?",
        constraint="a path inside the data folder, without '..' or hidden names",
        read_by=(Workload.IMAGES,),
    )
    image_size: int = setting(
        32,
        "Image size",
        "Pixels per side; memory grows with its square.",
        limits=(8, 1024),
        read_by=(Workload.IMAGES, Workload.RESNET, Workload.MEMORY_STRESS),
    )
    horizontal_flip: bool = setting(
        True,
        "Random flip",
        "Mirrors half of the training images. Turn it off where left and right matter, as in "
        "digits or text.",
        read_by=(Workload.IMAGES,),
    )

    lr_scheduler: LRSchedule = setting(
        LRSchedule.COSINE,
        "LR scheduler",
        "Cosine decays to 0 over the run.",
        TRAINING,
        choices={LRSchedule.NONE: "Constant", LRSchedule.COSINE: "Cosine"},
    )
    lr_warmup_steps: int = setting(
        0,
        "LR warm-up steps",
        "Optimizer steps in which the learning rate rises linearly to its value; 0 is off.",
        TRAINING,
        limits=(0, 10**6),
    )
    gradient_accumulation_steps: int = setting(
        1,
        "Gradient accumulation",
        "Accumulates gradients over several batches per optimizer step, so a large effective "
        "batch fits in little memory. Saves no compute: one large batch is faster if it fits.",
        TRAINING,
        limits=(1, 1024),
        in_lab=True,
    )
    max_grad_norm: float = setting(
        0.0,
        "Max gradient norm",
        "Clips the total gradient 2-norm to this value; 0 disables clipping. Stabilizes training "
        "for one extra pass over the gradients.",
        TRAINING,
        limits=(0.0, 1e6),
        in_lab=True,
    )
    max_steps: int = setting(
        0,
        "Max steps",
        "Stop after this many optimizer steps even if epochs remain; 0 trains all epochs.",
        TRAINING,
        limits=(0, 10**9),
    )
    seed: int = setting(
        0,
        "Seed",
        "On a CPU, the same seed reproduces the losses bit for bit.",
        TRAINING,
        limits=(0, 2**31 - 1),
    )
    resume_from: str = setting(
        "",
        "Resume from",
        "A checkpoint of an earlier run with the same workload. Restores weights, optimizer, "
        "scheduler and RNG state and continues the epoch count; a changed learning rate applies "
        "from here on.",
        TRAINING,
        pattern=rf"({CHECKPOINT.pattern})?",
        constraint="RUN_ID/best.pt, last.pt or step-N.pt",
    )

    compile_mode: CompileMode = setting(
        CompileMode.NONE,
        "torch.compile",
        "Compiles the model into fewer, larger kernels; reduce-overhead adds CUDA Graphs, "
        "max-autotune tries many kernels. Compiling takes seconds to minutes, which a short run "
        "does not earn back.",
        PERFORMANCE,
        choices={
            CompileMode.NONE: "Off",
            CompileMode.DEFAULT: "default",
            CompileMode.REDUCE_OVERHEAD: "reduce-overhead",
            CompileMode.MAX_AUTOTUNE: "max-autotune",
        },
        in_lab=True,
    )
    cuda_graphs: bool = setting(
        False,
        "CUDA Graphs",
        "Captures the whole step once and replays it with a single launch. Helps launch-bound "
        "models only. Needs the fused optimizer and no accumulation.",
        PERFORMANCE,
        in_lab=True,
    )
    channels_last: bool = setting(
        True,
        "channels_last",
        "Stores images in NHWC order, which tensor cores and CPU convolutions prefer. No effect "
        "without convolutions.",
        PERFORMANCE,
        in_lab=True,
    )
    cudnn_benchmark: bool = setting(
        False,
        "cudnn.benchmark",
        "Benchmarks cuDNN's convolution algorithms on the first batch of each shape and keeps the "
        "fastest. No effect without convolutions; slow if shapes vary.",
        PERFORMANCE,
        in_lab=True,
    )
    optimizer_impl: OptimizerImpl = setting(
        OptimizerImpl.FUSED,
        "Optimizer implementation",
        "fused updates all parameters in one kernel, foreach in a few multi-tensor kernels with "
        "extra memory, for-loop one by one. No gain for few parameters or long steps.",
        PERFORMANCE,
        choices={impl: impl.value for impl in OptimizerImpl},
        in_lab=True,
    )
    activation_checkpointing: bool = setting(
        False,
        "Activation checkpointing",
        "Recomputes most activations in the backward pass instead of storing them. Costs about a "
        "third more compute, so it pays off only if it makes room for a larger batch.",
        PERFORMANCE,
        in_lab=True,
    )

    num_workers: int = setting(
        0,
        "num_workers",
        "Processes that load batches; 0 loads in the training thread. Helps if decoding is slow; "
        "data in memory loads faster without workers.",
        LOADING,
        limits=(0, 64),
        in_lab=True,
    )
    pin_memory: bool = setting(
        False,
        "pin_memory",
        "Copies batches into pinned memory, from which copies to the GPU are faster and can "
        "overlap. No gain for small batches, no effect with the dataset on the device.",
        LOADING,
        in_lab=True,
    )
    non_blocking: bool = setting(
        False,
        "non_blocking copies",
        "Copies to the GPU without blocking the training thread. Needs pin_memory; no gain if "
        "copies are a small part of the step, none with the dataset on the device.",
        LOADING,
        in_lab=True,
    )
    dataset_on_device: bool = setting(
        False,
        "Dataset on device",
        "GPU: copies the whole dataset once, so no batch is transferred. CPU: caches decoded "
        "images. Must fit in memory next to training; a GPU cannot hold data that must be "
        "decoded.",
        LOADING,
        in_lab=True,
    )

    strategy: Strategy = setting(
        Strategy.NONE,
        "Strategy",
        "DDP: a full copy of the model per device, gradients are averaged. FSDP2: shards weights, "
        "gradients and optimizer state. DataParallel: one process that replicates the model every "
        "step. Small models do not gain, as ranks wait for each other.",
        DISTRIBUTED,
        choices={
            Strategy.NONE: "None (single device)",
            Strategy.DP: "DataParallel",
            Strategy.DDP: "DDP",
            Strategy.FSDP: "FSDP2",
        },
    )
    devices_per_node: int = setting(
        1,
        "Devices",
        "Devices of this machine, one process each (DataParallel: one process); on a CPU the "
        "processes share the cores. More devices mean more samples per step: epochs get shorter, "
        "but the loss may not fall as fast.",
        DISTRIBUTED,
        limits=(1, 64),
    )

    deterministic: bool = setting(
        False,
        "Deterministic algorithms",
        "Uses only deterministic algorithms. Never faster; other operations end the run.",
        ADVANCED,
        in_lab=True,
    )
    nan_policy: NanPolicy = setting(
        NanPolicy.STOP,
        "On NaN loss",
        "What to do when the training loss is NaN or infinite.",
        ADVANCED,
        choices={NanPolicy.STOP: "Stop the run", NanPolicy.CONTINUE: "Log it and continue"},
    )
    set_to_none: bool = setting(
        True,
        "zero_grad(set_to_none)",
        "Sets gradients to None after each step instead of zeroing them. Saves one write per "
        "parameter, negligible for models with few parameters.",
        ADVANCED,
        in_lab=True,
    )
    prefetch_factor: int = setting(
        2,
        "prefetch_factor",
        "Batches each worker loads ahead. Evens out load times, but does not help workers that are "
        "too slow on average.",
        ADVANCED,
        limits=(1, 64),
        in_lab=True,
    )
    persistent_workers: bool = setting(
        True,
        "Persistent workers",
        "Keeps DataLoader workers and their memory between epochs. No effect within an epoch.",
        ADVANCED,
        in_lab=True,
    )
    copy_stream: bool = setting(
        False,
        "Copy on a side stream",
        "Copies the next batch on a side CUDA stream while the current one is computed. Takes "
        "memory for one extra batch; needs pin_memory to overlap.",
        ADVANCED,
        in_lab=True,
    )
    kernel_warmup: bool = setting(
        False,
        "Kernel warm-up",
        "Runs a few uncounted steps first, so kernels are loaded and selected; weights are "
        "unchanged. The rest of the run is no faster.",
        ADVANCED,
        in_lab=True,
    )
    preallocate_memory: bool = setting(
        False,
        "Preallocate memory",
        "Reserves the memory of the largest step before training. Avoids driver calls in the "
        "first steps only.",
        ADVANCED,
        in_lab=True,
    )
    runner: Runner = setting(
        Runner.THREAD,
        "Run in",
        "A separate process starts more slowly, but the dashboard cannot slow it down.",
        ADVANCED,
        choices={Runner.THREAD: "Server thread", Runner.PROCESS: "Separate process"},
    )
    num_threads: int = setting(
        0,
        "CPU threads",
        "Threads per CPU operation; 0 uses half the cores.",
        ADVANCED,
        limits=(0, 256),
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            checked = check(spec.name, SETTINGS[spec.name], getattr(self, spec.name))
            object.__setattr__(self, spec.name, checked)

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
        workload = check_setting("workload", values.get("workload", Workload.DIGITS_CNN))
        base = defaults(workload, check_setting("device", values.get("device", "cpu")))
        return replace(base, **{name: values[name] for name in SETTINGS if name in values})

    def to_params(self) -> dict[str, str]:
        """Return URL parameters: the differences from the defaults of this workload and device."""
        base = replace(
            defaults(self.workload, self.device), workload=Workload.DIGITS_CNN, device="cpu"
        )
        values = {name: getattr(self, name) for name in SETTINGS}
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
        for name in SETTINGS:
            if name in params:
                try:
                    chosen[name] = check_setting(name, params[name], from_text=True)
                except ConfigError as error:
                    problems.append(error.problem)
        base = defaults(chosen.get("workload", Workload.DIGITS_CNN), chosen.get("device", "cpu"))
        return replace(base, **chosen), problems


SETTINGS = settings_of(RunConfig)


def check_setting(name: str, value: Any, *, from_text: bool = False) -> Any:
    """Return the value in the type of its setting, also of a text. Raises ConfigError."""
    return check(name, SETTINGS[name], value, from_text=from_text)


def limits_of(name: str) -> tuple[float, float]:
    """Return the inclusive limits of a number."""
    limits = SETTINGS[name].limits
    assert limits is not None, name
    return limits


def issue(name: str, reason: str, remedy: str) -> ConfigIssue:
    """Return an issue of a setting, with its label."""
    return ConfigIssue(name, reason, remedy, SETTINGS[name].label)


def reads(workload: Workload, name: str) -> bool:
    """Return True if a workload reads a setting."""
    return not SETTINGS[name].read_by or workload in SETTINGS[name].read_by


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
