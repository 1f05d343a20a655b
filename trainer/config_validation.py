"""Which settings a device cannot run, which exclude each other, and why. Pure; no torch import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import (
    CompileMode,
    ConfigError,
    ConfigIssue,
    LRSchedule,
    Optimizer,
    OptimizerImpl,
    Precision,
    RunConfig,
    Runner,
    Strategy,
    Workload,
)
from trainer.workload_traits import TRAITS

_DEFAULT_PREFETCH = RunConfig().prefetch_factor
_RESNET_SHRINKS = 32
"""How many pixels of a side become one: a quarter of them in the stem, half in three stages."""
_FEW_LAYERS = frozenset({Workload.LINEAR, Workload.DIGITS_MLP})
NODES_BY_HAND = ConfigIssue(
    "num_nodes",
    "each node starts its own part of the job",
    "Run the command shown below the header on every node, or set Nodes to 1",
)
"""Why the page's Start cannot begin such a job; ranks that were started by hand do not ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDevice:
    """A device that training could use; made by `trainer.devices.list_devices`.

    `reason` is None when torch can train on it, else the sentence why not; `compile_reason` says
    the same of torch.compile, `connection_reason` of ranks on such devices that exchange gradients.
    """

    id: str  # "cpu" or the GPU's UUID, as NVML prints it
    name: str
    memory_total: int  # bytes
    cuda_index: int | None = None  # torch's index, after CUDA_VISIBLE_DEVICES
    compute_capability: tuple[int, int] | None = None
    reason: str | None = None
    compile_reason: str | None = None
    connection_reason: str | None = None


def validate(config: RunConfig, devices: Sequence[TrainDevice]) -> tuple[ConfigIssue, ...]:
    """Every reason why this configuration cannot start on these devices; empty when it can."""
    device = next((device for device in devices if device.id == config.device), None)
    if device is None:
        reason = f"this machine has no device {config.device}"
        return (ConfigIssue("device", reason, "Choose another device"),)
    on_gpu = device.cuda_index is not None
    found = [
        ConfigIssue("device", device.reason, "Choose another device") if device.reason else None,
        _precision_problem(config.precision, device),
        *step_problems(config, on_gpu=on_gpu, compile_reason=device.compile_reason),
        *loading_problems(config, on_gpu=on_gpu),
        *parallel_problems(
            config, gpus=_gpus(device, devices), connection=device.connection_reason
        ),
    ]
    return tuple(problem for problem in found if problem is not None)


def choice_problem(
    field: str, value: Any, config: RunConfig, devices: Sequence[TrainDevice]
) -> ConfigIssue | None:
    """Why `field` could not be `value` with the rest as it is: what disables a sidebar option."""
    try:
        candidate = replace(config, **{field: value})
    except ConfigError as error:
        return error.problem
    return next((p for p in validate(candidate, devices) if p.field == field), None)


def _gpus(device: TrainDevice, devices: Sequence[TrainDevice]) -> int:
    """Return how many GPUs can train beside this one, itself included; 0 for a CPU."""
    usable = [one for one in devices if one.cuda_index is not None and one.reason is None]
    return 0 if device.cuda_index is None else len(usable)


def _precision_problem(precision: Precision, device: TrainDevice) -> ConfigIssue | None:
    capability = device.compute_capability
    if capability is None:
        # Autocast to bf16 and fp16 works on every CPU, slowly without instructions for it.
        reason = {
            Precision.TF32: "TF32 needs NVIDIA tensor cores",
            Precision.PURE_FP16: "pure FP16 needs a GPU: most CPUs have no FP16 arithmetic",
        }.get(precision)
        return ConfigIssue("precision", reason, "Choose fp32, bf16 or fp16") if reason else None
    needed = {
        Precision.TF32: (8, 0),
        Precision.BF16: (8, 0),
        Precision.PURE_BF16: (8, 0),
        Precision.FP16: (5, 3),
        Precision.PURE_FP16: (5, 3),
    }
    least = needed.get(precision, (0, 0))
    if capability >= least:
        return None
    return ConfigIssue(
        "precision",
        f"{precision} needs compute capability {least[0]}.{least[1]}, "
        f"{device.name} has {capability[0]}.{capability[1]}",
        "Choose fp16 or fp32" if capability >= (5, 3) else "Choose fp32",
    )


def half_batch(config: RunConfig, devices: Sequence[TrainDevice]) -> RunConfig | ConfigIssue:
    """Return the run with half the batch and twice the accumulation, or why it cannot be.

    A step then uses the same samples (one fewer for each batch of odd size), and half of them at a
    time. It starts afresh, not from a checkpoint.
    """
    if config.batch_size < 2:
        return ConfigIssue(
            "batch_size", "a batch of one sample cannot be halved", "Lower other sizes"
        )
    try:
        smaller = replace(
            config,
            batch_size=config.batch_size // 2,
            gradient_accumulation_steps=2 * config.gradient_accumulation_steps,
        )
    except ConfigError as error:
        return error.problem
    return next(iter(validate(smaller, devices)), smaller)


def step_problems(
    config: RunConfig, *, on_gpu: bool, compile_reason: str | None
) -> list[ConfigIssue]:
    """Every reason why a step with these settings cannot be, or would be as without one of them.

    `compile_reason` says why torch.compile cannot work for this device, None where it can.
    """
    compiles = config.compile_mode is not CompileMode.NONE
    return [
        *_pairs(config),
        *_without_effect(config),
        *_too_few_values(config),
        *(_compile_problems(config, on_gpu, compile_reason) if compiles else ()),
        *(_graph_problems(config) if config.cuda_graphs and on_gpu else ()),
        *(() if on_gpu else _gpu_only(config)),
    ]


def epoch_problem(config: RunConfig, samples: int) -> ConfigIssue | None:
    """Why epochs of so many samples are too short for the settings; None where they are not."""
    batches = -(-samples // (config.batch_size * config.world_size))
    if config.gradient_accumulation_steps > batches:
        reason = (
            f"an epoch has {batches} batches of {config.batch_size}, fewer than the "
            f"{config.gradient_accumulation_steps} to accumulate"
        )
        remedy = "Lower gradient_accumulation_steps or batch_size"
        return ConfigIssue("gradient_accumulation_steps", reason, remedy)
    total = config.epochs * -(-samples // config.step_size)
    total = min(total, config.max_steps or total)
    if 0 < config.lr_warmup_steps >= total:
        reason = f"must be below the {total:,} steps of the run, got {config.lr_warmup_steps:,}"
        return ConfigIssue("lr_warmup_steps", reason, "Lower it, or train for more steps")
    return None


def _pairs(config: RunConfig) -> Iterator[ConfigIssue]:
    """Two settings that exclude each other: a problem of both, so that either can go."""
    if config.deterministic and config.cudnn_benchmark:
        reason = "cudnn.benchmark may pick a different algorithm each run"
        yield ConfigIssue("deterministic", reason, "Turn off cudnn_benchmark")
        yield ConfigIssue("cudnn_benchmark", reason, "Turn off deterministic")
    if config.lr_warmup_steps and config.lr_scheduler is LRSchedule.PLATEAU:
        reason = "the plateau schedule changes the learning rate after epochs only"
        yield ConfigIssue("lr_warmup_steps", reason, "Set it to 0, or choose the cosine schedule")


def _without_effect(config: RunConfig) -> Iterator[ConfigIssue]:
    if not TRAITS[config.workload].convolutions:
        for field in ("channels_last", "cudnn_benchmark"):
            if getattr(config, field):
                reason = f"it acts on convolutions, and {config.workload} has none"
                yield ConfigIssue(field, reason, "Switch it off")
    if config.activation_checkpointing and config.workload in _FEW_LAYERS:
        reason = "a model of one or two layers has no activations to checkpoint"
        yield ConfigIssue("activation_checkpointing", reason, "Switch it off")


def _too_few_values(config: RunConfig) -> Iterator[ConfigIssue]:
    """Batch norm needs two values of each channel, in the batch or in the image."""
    small = config.image_size <= _RESNET_SHRINKS
    if config.workload is Workload.RESNET and config.batch_size == 1 and small:
        reason = (
            f"batch norm needs two values per channel; {config.image_size} px images leave one, "
            "and the batch has one image"
        )
        remedy = f"Raise batch_size, or image_size above {_RESNET_SHRINKS}"
        yield ConfigIssue("image_size", reason, remedy)
        yield ConfigIssue("batch_size", reason, remedy)


def _gpu_only(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "cudnn_benchmark": "cuDNN runs on GPUs only",
        "cuda_graphs": "CUDA Graphs run on GPUs only",
        "preallocate_memory": "PyTorch has no caching allocator for CPU memory",
    }
    for field, reason in reasons.items():
        if getattr(config, field):
            yield ConfigIssue(field, reason, "Switch it off, or choose a GPU")


def _compile_problems(
    config: RunConfig, on_gpu: bool, compile_reason: str | None
) -> Iterator[ConfigIssue]:
    if compile_reason is not None:
        yield ConfigIssue("compile_mode", compile_reason, "Set compile_mode to none")
    if config.activation_checkpointing:
        reason = "torch.compile decides itself what to recompute"
        yield ConfigIssue("compile_mode", reason, "Switch off activation_checkpointing")
        yield ConfigIssue("activation_checkpointing", reason, "Set compile_mode to none")
    if config.compile_mode is CompileMode.REDUCE_OVERHEAD and not on_gpu:
        reason = "reduce-overhead uses CUDA Graphs, which need a GPU"
        yield ConfigIssue("compile_mode", reason, "Choose default or max-autotune on a CPU")


def _graph_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.compile_mode is not CompileMode.NONE:
        reason = "use either torch.compile or CUDA Graphs, not both"
        yield ConfigIssue("cuda_graphs", reason, "Set compile_mode to none")
        yield ConfigIssue("compile_mode", reason, "Switch off cuda_graphs")
    if config.activation_checkpointing and config.workload is Workload.GPT and config.dropout:
        reason = "dropout recomputed inside a CUDA graph would draw different random numbers"
        yield ConfigIssue("cuda_graphs", reason, "Switch off activation_checkpointing or dropout")
        yield ConfigIssue("activation_checkpointing", reason, "Switch off cuda_graphs or dropout")
    if not config.set_to_none:
        reason = "a captured step overwrites its gradients, so there is nothing to zero"
        yield ConfigIssue("set_to_none", reason, "Switch it on")
    for field in ("kernel_warmup", "preallocate_memory"):
        if getattr(config, field):
            reason = "CUDA Graphs already run warm-up steps and keep their memory reserved"
            yield ConfigIssue(field, reason, "Switch it off")
    if config.optimizer_impl is not OptimizerImpl.FUSED:
        if config.precision is Precision.FP16:
            reason = (
                "a captured FP16 step needs the fused optimizer, which can skip a step on the GPU"
            )
            yield ConfigIssue("cuda_graphs", reason, "Set optimizer_impl to fused")
        elif config.optimizer is Optimizer.SGD:
            reason = "only fused SGD reads its learning rate from the GPU"
            yield ConfigIssue("cuda_graphs", reason, "Set optimizer_impl to fused")


def loading_problems(config: RunConfig, *, on_gpu: bool) -> list[ConfigIssue]:
    """Every reason why batches cannot be loaded with these settings, or come as without one."""
    return [
        *(_copy_problems(config) if on_gpu else _on_a_cpu(config)),
        *(() if config.num_workers else _without_workers(config)),
    ]


def _on_a_cpu(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "pin_memory": "pinned memory only speeds up copies to a GPU",
        "non_blocking": "on a CPU there is nothing to copy",
        "copy_stream": "on a CPU there is nothing to copy",
    }
    if not TRAITS[config.workload].decodes:
        reasons["dataset_on_device"] = "on a CPU the data is already in memory"
    for field, reason in reasons.items():
        if getattr(config, field):
            yield ConfigIssue(field, reason, "Switch it off")
    if config.dataset_on_device and config.num_workers:
        reason = "workers decode in their own processes"
        yield ConfigIssue("dataset_on_device", reason, "Set num_workers to 0")


def _copy_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    for field in ("non_blocking", "copy_stream"):
        if getattr(config, field) and not config.pin_memory:
            reason = "only copies from pinned memory can overlap"
            yield ConfigIssue(field, reason, "Switch on pin_memory")
    if not config.dataset_on_device:
        return
    # pin_memory and non_blocking may stay on, as they are by default: they do nothing then.
    if config.copy_stream:
        reason = "with the dataset on the device no batch is copied"
        yield ConfigIssue("copy_stream", reason, "Switch off copy_stream or dataset_on_device")
    if config.num_workers:
        reason = "workers load batches on the host"
        yield ConfigIssue("dataset_on_device", reason, "Set num_workers to 0")
    if TRAITS[config.workload].decodes:
        reason = f"{config.workload} reads each sample from disk on demand"
        yield ConfigIssue("dataset_on_device", reason, "Switch it off")


def _without_workers(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.prefetch_factor != _DEFAULT_PREFETCH:
        yield ConfigIssue("prefetch_factor", "only workers prefetch", "Set num_workers above 0")
    if not config.persistent_workers:
        reason = "there are no workers to keep alive"
        yield ConfigIssue("persistent_workers", reason, "Switch it on, or set num_workers above 0")


def parallel_problems(config: RunConfig, *, gpus: int, connection: str | None) -> list[ConfigIssue]:
    """Every reason why the devices cannot share the work as the settings say.

    `gpus` is the number of GPUs of this machine that torch can train on, if it trains on GPUs, else
    0. `connection` says why ranks on such devices cannot talk to each other, None where they can.
    """
    if config.strategy is Strategy.NONE:
        return [*_runner(config)]
    on_gpu = config.device != "cpu"
    return [
        *_runner(config),
        *(() if config.strategy is not Strategy.DP else _data_parallel(config, on_gpu)),
        *_ranks(config, gpus, on_gpu),
        *(_distributed(config, on_gpu, connection) if config.distributed else ()),
        *(_cuda_graphs(config) if on_gpu else ()),
    ]


def start_problem(config: RunConfig) -> ConfigIssue | None:
    """Why a page cannot start these settings although they can train; None where it can."""
    return NODES_BY_HAND if config.distributed and config.num_nodes > 1 else None


def parallel_notes(config: RunConfig, cores: int) -> list[str]:
    """Return what to know of settings that can run, one text each."""
    notes = []
    if config.distributed and config.device == "cpu" and config.devices_per_node > cores:
        have = "core" if cores == 1 else "cores"
        notes.append(
            f"{config.devices_per_node} ranks share {cores} {have}: good to see how ranks work "
            "together, but slower than fewer ranks."
        )
    if (
        config.strategy is Strategy.FSDP
        and config.no_sync
        and config.gradient_accumulation_steps > 1
    ):
        notes.append(
            "Between the batches of a step each rank keeps whole gradients in fp32, 4 bytes a "
            "weight. If they do not fit, switch off no_sync."
        )
    return notes


def step_sentence(config: RunConfig) -> str | None:
    """Return how many samples a step takes from all devices together; None for one device."""
    if config.strategy is Strategy.NONE:
        return None
    batches = (
        f" × {config.gradient_accumulation_steps} batches"
        if config.gradient_accumulation_steps > 1
        else ""
    )
    if config.strategy is Strategy.DP:
        total = config.batch_size * config.gradient_accumulation_steps
        return (
            f"Each step uses {total:,} samples: batches of {config.batch_size:,}{batches}, each "
            f"split across {config.devices_per_node} GPUs."
        )
    nodes = f" × {config.num_nodes} machines" if config.num_nodes > 1 else ""
    return (
        f"Each step uses {config.step_size:,} samples: {config.batch_size:,} × "
        f"{config.devices_per_node} ranks{nodes}{batches}. You may have to rescale the learning "
        "rate."
    )


def _runner(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.distributed and config.runner is not Runner.TORCHRUN:
        reason = f"{config.strategy} ranks are started by torchrun"
        yield ConfigIssue("runner", reason, "Set runner to torchrun")
    if not config.distributed and config.runner is Runner.TORCHRUN:
        yield ConfigIssue("runner", "torchrun is only for DDP and FSDP2", "Set runner to process")


def _data_parallel(config: RunConfig, on_gpu: bool) -> Iterator[ConfigIssue]:
    if not on_gpu:
        reason = "DataParallel replicates the model across GPUs"
        yield ConfigIssue("strategy", reason, "Choose DDP on a CPU, or a GPU")
    if config.compile_mode is not CompileMode.NONE:
        reason = (
            "DataParallel replicates the model every step, which torch.compile does not support"
        )
        yield ConfigIssue("compile_mode", reason, "Choose DDP, or set compile_mode to none")
        yield ConfigIssue("strategy", reason, "Choose DDP, or set compile_mode to none")
    if config.activation_checkpointing:
        reason = "DataParallel replicas would recompute on the first GPU"
        yield ConfigIssue("activation_checkpointing", reason, "Switch it off, or choose DDP")
        yield ConfigIssue("strategy", reason, "Choose DDP, or switch off activation_checkpointing")


def _ranks(config: RunConfig, gpus: int, on_gpu: bool) -> Iterator[ConfigIssue]:
    here = config.num_nodes == 1 or config.strategy is Strategy.DP
    if on_gpu and here and config.devices_per_node > gpus:
        reason = f"each rank needs its own GPU, and PyTorch can use {gpus} here"
        yield ConfigIssue("devices_per_node", reason, f"Lower devices_per_node to {max(1, gpus)}")


def _distributed(config: RunConfig, on_gpu: bool, connection: str | None) -> Iterator[ConfigIssue]:
    if connection is not None:
        yield ConfigIssue("strategy", connection, "Set strategy to none")
    if config.time_collectives and not on_gpu:
        reason = "gloo (CPU) does not time collectives"
        yield ConfigIssue("time_collectives", reason, "Switch it off, or choose a GPU")
    if config.strategy is Strategy.FSDP:
        yield from _fsdp(config, on_gpu)


def _fsdp(config: RunConfig, on_gpu: bool) -> Iterator[ConfigIssue]:
    if config.optimizer is Optimizer.SGD and config.optimizer_impl is OptimizerImpl.FUSED:
        reason = "PyTorch has no fused SGD for sharded weights"
        yield ConfigIssue("optimizer_impl", reason, "Set it to foreach, or choose adam")
        yield ConfigIssue(
            "optimizer", reason, "Choose adam or adamw, or set optimizer_impl to foreach"
        )
    if config.cpu_offload and not on_gpu:
        reason = "on a CPU the weights are already in host memory"
        yield ConfigIssue("cpu_offload", reason, "Switch it off, or choose a GPU")


def _cuda_graphs(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.cuda_graphs:
        reason = "a multi-device step is not captured: the devices wait for each other inside it"
        yield ConfigIssue("cuda_graphs", reason, "Switch it off, or set strategy to none")
        yield ConfigIssue("strategy", reason, "Switch off cuda_graphs")
