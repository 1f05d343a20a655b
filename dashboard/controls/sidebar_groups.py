"""The sidebar's collapsed groups: techniques, and rarely changed settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import streamlit as st

from dashboard.controls import config_widgets as widgets
from dashboard.format import note
from trainer import config as fields
from trainer.config_validation import cores_note, step_sentence

COMPILE = {
    fields.CompileMode.NONE: "Off",
    fields.CompileMode.DEFAULT: "default",
    fields.CompileMode.REDUCE_OVERHEAD: "reduce-overhead",
    fields.CompileMode.MAX_AUTOTUNE: "max-autotune",
}
SCHEDULES = {
    fields.LRSchedule.NONE: "Constant",
    fields.LRSchedule.PLATEAU: "Reduce on plateau",
    fields.LRSchedule.COSINE: "Cosine",
}
RUNNERS = {fields.Runner.THREAD: "Server thread", fields.Runner.PROCESS: "Separate process"}
NAN_POLICIES = {
    fields.NanPolicy.STOP: "Stop the run",
    fields.NanPolicy.CONTINUE: "Log it and continue",
}
STRATEGIES = {
    fields.Strategy.NONE: "None (single device)",
    fields.Strategy.DP: "DataParallel",
    fields.Strategy.DDP: "DDP",
    fields.Strategy.FSDP: "FSDP2",
}
CPU_RANKS = 2  # Default number of ranks on a CPU.
GROUPS: dict[str, tuple[str, ...]] = {
    "Training": (
        *("lr_scheduler", "lr_warmup_steps", "gradient_accumulation_steps", "max_grad_norm"),
        *("max_steps", "seed", "resume_from"),
    ),
    "Performance": (
        *("compile_mode", "cuda_graphs", "channels_last", "cudnn_benchmark", "optimizer_impl"),
        "activation_checkpointing",
    ),
    "Data loading": ("num_workers", "pin_memory", "non_blocking", "dataset_on_device"),
    "Distributed": ("strategy", "devices_per_node", "num_nodes", "max_restarts"),
    "Advanced": (
        *("deterministic", "nan_policy", "set_to_none"),
        *("prefetch_factor", "persistent_workers", "copy_stream"),
        *("kernel_warmup", "preallocate_memory"),
        *("no_sync", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb"),
        *("reshard_after_forward", "cpu_offload", "time_collectives", "runner", "num_threads"),
    ),
}
"""The fields of each group."""
PLACES = {name: group for group, names in GROUPS.items() for name in names}
"""The group of each field."""


def groups(choice: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    """Draw the groups, collapsed: a run needs none of them to start."""
    for group, draw in (
        ("Training", functools.partial(_training, choice, checkpoints)),
        ("Performance", functools.partial(_performance, choice)),
        ("Data loading", functools.partial(_data_loading, choice)),
        ("Distributed", functools.partial(_distributed, choice)),
        ("Advanced", functools.partial(_advanced, choice)),
    ):
        with st.expander(group_label(group, choice.config), key=f"group_{group}"):
            draw()


def group_label(group: str, config: fields.RunConfig) -> str:
    """Return the group's name and its differences from the workload's defaults.

    >>> group_label("Performance", fields.RunConfig(compile="default", channels_last=False))
    'Performance · torch.compile default, channels_last off'
    """
    base = fields.defaults(config.workload, config.device)
    changed = []
    for name in GROUPS[group]:
        value = getattr(config, name)
        if value != getattr(base, name):
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            changed.append(f"{widgets.TEXTS[name][0]} {shown}")
    return f"{group} · {', '.join(changed)}" if changed else group


def _training(choice: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    widgets.select("lr_scheduler", SCHEDULES)
    steps = choice.config.lr_warmup_steps
    widgets.number(
        "lr_warmup_steps", refused=choice.refusal("lr_warmup_steps", steps or 1), off=not steps
    )
    for name in ("gradient_accumulation_steps", "max_grad_norm"):
        widgets.switch_number(name, choice)
    widgets.number("max_steps")
    widgets.number("seed")
    current = st.session_state.get("config_resume_from", "")
    names = dict.fromkeys(["", current, *checkpoints])
    widgets.select("resume_from", {name: name or "None (start from scratch)" for name in names})


def _performance(choice: widgets.SidebarState) -> None:
    widgets.switch_select("compile_mode", COMPILE, choice)
    for name in GROUPS["Performance"][1:]:
        if name == "optimizer_impl":
            widgets.switch_select(name, {impl: impl.value for impl in fields.OptimizerImpl}, choice)
        else:
            widgets.switch(name, choice)


def _data_loading(choice: widgets.SidebarState) -> None:
    widgets.switch_number("num_workers", choice)
    for name in GROUPS["Data loading"][1:]:
        widgets.switch(name, choice)


def _distributed(choice: widgets.SidebarState) -> None:
    config = choice.config
    widgets.switch_select(
        "strategy", STRATEGIES, choice, functools.partial(_set_default_ranks, choice)
    )
    if config.strategy is fields.Strategy.NONE:
        return
    widgets.switch_number("devices_per_node", choice)
    note("info", _placement(config))
    if config.distributed:
        for name in ("num_nodes", "max_restarts"):
            widgets.switch_number(name, choice)
    for sentence in (step_sentence(config), cores_note(config, os.cpu_count() or 1)):
        if sentence is not None:
            note("info", sentence)


def _advanced(choice: widgets.SidebarState) -> None:
    config = choice.config
    widgets.switch("deterministic", choice)
    widgets.select("nan_policy", NAN_POLICIES)
    widgets.switch("set_to_none", choice)
    if config.num_workers > 0:
        widgets.switch_number("prefetch_factor", choice)
        widgets.switch("persistent_workers", choice)
    for name in ("copy_stream", "kernel_warmup", "preallocate_memory", *_strategy_switches(config)):
        widgets.switch(name, choice)
    if config.strategy is fields.Strategy.DDP:
        widgets.switch_number("bucket_cap_mb", choice)
    if config.distributed:
        st.caption("Launcher: torchrun, one process per rank.")
    else:
        widgets.select("runner", RUNNERS)
    widgets.number("num_threads")


def _strategy_switches(config: fields.RunConfig) -> list[str]:
    """Return the switches that have an effect with the strategy and the device."""
    on_gpu = config.device != "cpu"
    found = []
    if config.strategy is fields.Strategy.DDP:
        found = ["static_graph", "gradient_as_bucket_view"]
    elif config.strategy is fields.Strategy.FSDP:
        found = ["reshard_after_forward"]
        if on_gpu or config.cpu_offload:
            found.append("cpu_offload")
    if config.distributed and config.gradient_accumulation_steps > 1:
        found.append("no_sync")
    if config.distributed and (on_gpu or config.time_collectives):
        found.append("time_collectives")
    return found


def _placement(config: fields.RunConfig) -> str:
    """Return where the ranks run: with DDP and FSDP2 the Device setting does not select GPUs."""
    if config.device == "cpu":
        return "Each rank is a CPU process, connected by gloo."
    if config.strategy is fields.Strategy.DP:
        return "Uses the device above and the next ones by index."
    return "Rank 0 runs on cuda:0, rank 1 on cuda:1, and so on, connected by NCCL."


def _set_default_ranks(choice: widgets.SidebarState) -> None:
    """Set the number of ranks of a newly chosen strategy to the number of GPUs."""
    state = st.session_state
    if state.config_strategy != fields.Strategy.NONE:
        gpus = [one for one in choice.devices if one.cuda_index is not None and one.reason is None]
        on_cpu = choice.config.device == "cpu"
        state.config_devices_per_node = CPU_RANKS if on_cpu else max(1, len(gpus))
