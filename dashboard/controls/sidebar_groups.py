"""The sidebar's collapsed groups of settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.controls import config_widgets as widgets
from dashboard.format import note
from trainer import config as fields
from trainer.training.config_validation import step_sentence

CPU_RANKS = 2  # Default number of ranks on a CPU.
PLACES = {name: about.group for name, about in fields.SETTINGS.items() if about.group}


def groups(state: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    """Draw the groups, collapsed: a run needs none of them to start."""
    for group in fields.GROUPS:
        with st.expander(group_label(group, state.config), key=f"group_{group}"):
            for name in names_in(group):
                if _has_effect(name, state.config):
                    _field(name, state, checkpoints)
            if group == "Distributed" and state.config.strategy is not fields.Strategy.NONE:
                _distributed_notes(state.config)


def names_in(group: str) -> list[str]:
    return [name for name, of_name in PLACES.items() if of_name == group]


def group_label(group: str, config: fields.RunConfig) -> str:
    """Return the group's name and its differences from the workload's defaults.

    >>> group_label("Performance", fields.RunConfig(compile="default", channels_last=False))
    'Performance · torch.compile default, channels_last off'
    """
    base = fields.defaults(config.workload, config.device)
    changed = differences(config, {name: getattr(base, name) for name in names_in(group)})
    return f"{group} · {', '.join(changed)}" if changed else group


def differences(config: fields.RunConfig, base: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ from `base`, with their values."""
    texts = []
    for name, usual in base.items():
        value = getattr(config, name)
        if value != usual:
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            texts.append(f"{fields.SETTINGS[name].label} {shown}")
    return texts


def _field(name: str, state: widgets.SidebarState, checkpoints: Sequence[str]) -> None:
    if name == "resume_from":
        current = st.session_state.get("config_resume_from", "")
        names = dict.fromkeys(["", current, *checkpoints])
        widgets.select(name, {each: each or "None (start from scratch)" for each in names})
    elif fields.SETTINGS[name].choices:
        on_change = functools.partial(_set_default_ranks, state) if name == "strategy" else None
        widgets.supported_select(name, state, on_change)
    else:
        widgets.switch_or_number(name, state)


def _has_effect(name: str, config: fields.RunConfig) -> bool:
    strategy = config.strategy
    has_effect = {
        "prefetch_factor": config.num_workers > 0,
        "persistent_workers": config.num_workers > 0,
        "devices_per_node": strategy is not fields.Strategy.NONE,
        "runner": not config.distributed,
    }
    return has_effect.get(name, True)


def _distributed_notes(config: fields.RunConfig) -> None:
    launcher = "Launcher: torchrun, one process per rank." if config.distributed else None
    for sentence in (_placement(config), launcher, step_sentence(config)):
        if sentence is not None:
            note("info", sentence)


def _placement(config: fields.RunConfig) -> str:
    """Return where the ranks run: with DDP and FSDP2 the Device setting does not select GPUs."""
    if config.device == "cpu":
        return "Each rank is a CPU process, connected by gloo."
    if config.strategy is fields.Strategy.DP:
        return "Uses the device above and the next ones by index."
    return "Rank 0 runs on cuda:0, rank 1 on cuda:1, and so on, connected by NCCL."


def _set_default_ranks(state: widgets.SidebarState) -> None:
    """Set the number of ranks of a newly chosen strategy to the number of GPUs."""
    if st.session_state.config_strategy != fields.Strategy.NONE:
        gpus = [one for one in state.devices if one.cuda_index is not None and one.reason is None]
        on_cpu = state.config.device == "cpu"
        st.session_state.config_devices_per_node = CPU_RANKS if on_cpu else max(1, len(gpus))
