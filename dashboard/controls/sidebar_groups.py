"""The sidebar's collapsed groups: techniques, and rarely changed settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import streamlit as st

from dashboard.controls import config_widgets as widgets
from dashboard.format import note
from stepscope.host.environment import granted_cores
from trainer import config as fields
from trainer.config_validation import cores_note, step_sentence

CPU_RANKS = 2  # Default number of ranks on a CPU.
PLACES = {name: about.group for name, about in fields.SETTINGS.items() if about.group}


def groups(choice: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    """Draw the groups, collapsed: a run needs none of them to start."""
    for group in fields.GROUPS:
        with st.expander(group_label(group, choice.config), key=f"group_{group}"):
            for name in names_in(group):
                if _has_effect(name, choice.config):
                    _field(name, choice, checkpoints)
            if group == "Distributed" and choice.config.strategy is not fields.Strategy.NONE:
                _distributed_notes(choice.config)


def names_in(group: str) -> list[str]:
    return [name for name, of_name in PLACES.items() if of_name == group]


def group_label(group: str, config: fields.RunConfig) -> str:
    """Return the group's name and its differences from the workload's defaults.

    >>> group_label("Performance", fields.RunConfig(compile="default", channels_last=False))
    'Performance · torch.compile default, channels_last off'
    """
    base = fields.defaults(config.workload, config.device)
    changed = []
    for name in names_in(group):
        value = getattr(config, name)
        if value != getattr(base, name):
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            changed.append(f"{fields.SETTINGS[name].label} {shown}")
    return f"{group} · {', '.join(changed)}" if changed else group


def _field(name: str, choice: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    if name == "resume_from":
        current = st.session_state.get("config_resume_from", "")
        names = dict.fromkeys(["", current, *checkpoints])
        widgets.select(name, {each: each or "None (start from scratch)" for each in names})
    elif fields.SETTINGS[name].choices:
        on_change = functools.partial(_set_default_ranks, choice) if name == "strategy" else None
        widgets.switch_select(name, choice, on_change)
    elif isinstance(getattr(choice.config, name), bool):
        widgets.switch(name, choice)
    else:
        widgets.switch_number(name, choice)


def _has_effect(name: str, config: fields.RunConfig) -> bool:
    strategy = config.strategy
    on_gpu = config.device != "cpu"
    of_workers = dict.fromkeys(("prefetch_factor", "persistent_workers"), config.num_workers > 0)
    of_strategy = {
        "devices_per_node": strategy is not fields.Strategy.NONE,
        "cpu_offload": strategy is fields.Strategy.FSDP and (on_gpu or config.cpu_offload),
        "runner": not config.distributed,
    }
    return (of_workers | of_strategy).get(name, True)


def _distributed_notes(config: fields.RunConfig) -> None:
    launcher = "Launcher: torchrun, one process per rank." if config.distributed else None
    notes = (step_sentence(config), cores_note(config, granted_cores()))
    for sentence in (_placement(config), launcher, *notes):
        if sentence is not None:
            note("info", sentence)


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
