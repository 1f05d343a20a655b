"""Which settings of several devices cannot be, or have no effect. Pure; no torch import.

What is set for another kind than the chosen one does not act, and is no problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import CompileMode, ConfigIssue, Optimizer, RunConfig, Runner, Strategy

NODES_BY_HAND = ConfigIssue(
    "num_nodes",
    "each node starts its own part of the job",
    "Run the command shown below the header on every node, or set Nodes to 1",
)
"""Why the page's Start cannot begin such a job; ranks that were started by hand do not ask."""


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
    if config.optimizer is Optimizer.SGD and config.fused:
        reason = "PyTorch has no fused SGD for sharded weights"
        yield ConfigIssue("fused", reason, "Switch it off, or choose adam")
        yield ConfigIssue("optimizer", reason, "Choose adam or adamw, or switch off fused")
    if config.cpu_offload and not on_gpu:
        reason = "on a CPU the weights are already in host memory"
        yield ConfigIssue("cpu_offload", reason, "Switch it off, or choose a GPU")


def _cuda_graphs(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.cuda_graphs:
        reason = "a multi-device step is not captured: the devices wait for each other inside it"
        yield ConfigIssue("cuda_graphs", reason, "Switch it off, or set strategy to none")
        yield ConfigIssue("strategy", reason, "Switch off cuda_graphs")
