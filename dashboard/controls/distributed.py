"""The sidebar's group "Several devices": how they share the work, and what acts on that kind."""

from __future__ import annotations

import functools
import os

import streamlit as st

from dashboard.controls.config_widgets import Choice, switch, switch_number, switch_select
from trainer.config import Parallel, RunConfig
from trainer.strategy_validation import parallel_notes, step_sentence

PARALLEL = {
    Parallel.NONE: "None: one device",
    Parallel.DP: "DataParallel",
    Parallel.DDP: "DDP",
    Parallel.FSDP: "FSDP2",
}
CPU_RANKS = 2
"""Ranks on a CPU at first: enough to see how they work together."""


def several_devices(choice: Choice) -> None:
    """Draw the group's content."""
    config = choice.config
    switch_select("parallel", PARALLEL, choice, functools.partial(_begin_with_ranks, choice))
    if config.parallel is Parallel.NONE:
        return
    switch_number("ranks", choice)
    st.caption(_places(config))
    for name in _acting(config):
        switch(name, choice)
    if config.parallel is Parallel.DDP:
        switch_number("bucket_mb", choice)
    if config.distributed:
        switch_number("max_restarts", choice)
        switch_number("nodes", choice)
    for sentence in (step_sentence(config), *parallel_notes(config, os.cpu_count() or 1)):
        if sentence is not None:
            st.caption(f":material/info: {sentence}")


def _acting(config: RunConfig) -> list[str]:
    """Return the switches that can make a difference with the chosen kind and device."""
    on_gpu = config.device != "cpu"
    found = []
    if config.parallel is Parallel.DDP:
        found = ["static_graph", "bucket_view"]
    elif config.parallel is Parallel.FSDP:
        found = ["reshard", *(["cpu_offload"] if on_gpu or config.cpu_offload else [])]
    if config.distributed and config.accumulation > 1:
        found.append("no_sync")
    if config.distributed and (on_gpu or config.collective_timing):
        found.append("collective_timing")
    return found


def _places(config: RunConfig) -> str:
    """Say where the ranks train: on GPUs it is not the device above that decides."""
    if config.device == "cpu":
        return "Each rank is a process on the CPU; gloo connects them."
    if config.parallel is Parallel.DP:
        return "The device above and the next ones by their index."
    return "Rank 0 trains on cuda:0, rank 1 on cuda:1, and so on; NCCL connects them."


def _begin_with_ranks(choice: Choice) -> None:
    """Give a kind that was just chosen as many ranks as there are GPUs."""
    state = st.session_state
    if state.config_parallel == Parallel.NONE:
        return
    gpus = [one for one in choice.devices if one.cuda_index is not None and one.reason is None]
    state.config_ranks = CPU_RANKS if choice.config.device == "cpu" else max(1, len(gpus))
