"""The sidebar's folded groups: every acceleration technique, and what is seldom changed."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from dashboard.controls.config_widgets import (
    Choice,
    number,
    reason,
    select,
    switch,
    switch_number,
    switch_select,
)
from dashboard.controls.distributed import several_devices
from trainer.config import Compile, NanPolicy, Runner, Schedule

COMPILE = {
    Compile.NONE: "Off",
    Compile.DEFAULT: "default",
    Compile.REDUCE_OVERHEAD: "reduce-overhead",
    Compile.MAX_AUTOTUNE: "max-autotune",
}
SCHEDULES = {
    Schedule.NONE: "Constant",
    Schedule.PLATEAU: "Reduce on plateau",
    Schedule.COSINE: "Cosine",
}
RUNNERS = {Runner.THREAD: "Thread of this server", Runner.PROCESS: "Child process"}
NAN_POLICIES = {NanPolicy.STOP: "Stop the run", NanPolicy.CONTINUE: "Mark it and go on"}


def groups(choice: Choice, checkpoints: Sequence[str]) -> None:
    """Draw the groups, folded: a run needs none of them to start."""
    with st.expander("Data loading"):
        _loading(choice)
    with st.expander("Optimizer"):
        _optimizer(choice)
    with st.expander("Kernels and graphs"):
        _kernels(choice)
    with st.expander("Several devices"):
        several_devices(choice)
    with st.expander("Memory"):
        switch("activation_checkpointing", choice)
        switch("memory_warmup", choice)
    with st.expander("More"):
        _more(choice, checkpoints)


def _loading(choice: Choice) -> None:
    for name in ("pin_memory", "non_blocking", "copy_stream", "data_on_device"):
        switch(name, choice)
    for name in ("num_workers", "prefetch_factor"):
        switch_number(name, choice)
    switch("persistent_workers", choice)


def _optimizer(choice: Choice) -> None:
    select(
        "schedule",
        "Learning rate schedule",
        SCHEDULES,
        "Cosine falls to 0 over the steps of the run; plateau halves the rate after an epoch when "
        "validation stalls.",
    )
    steps = choice.config.lr_warmup_steps
    refused = choice.refusal("lr_warmup_steps", steps or 1)
    number(
        "lr_warmup_steps",
        "Learning rate warm-up (steps)",
        "Optimizer steps in which the learning rate rises linearly to its value; 0 is off.",
        disabled=refused is not None and not steps,
    )
    if refused is not None:
        reason(refused, chosen=steps > 0)
    switch_number("accumulation", choice)
    for name in ("fused", "foreach", "set_to_none"):
        switch(name, choice)


def _kernels(choice: Choice) -> None:
    switch_select("compile", COMPILE, choice)
    for name in ("cuda_graphs", "channels_last", "cudnn_benchmark", "deterministic", "warmup"):
        switch(name, choice)


def _more(choice: Choice, checkpoints: Sequence[str]) -> None:
    number(
        "max_steps",
        "Steps at most",
        "The run ends after this many optimizer steps, before its epochs are over; 0 trains all "
        "epochs.",
    )
    select("nan_policy", "If the loss is NaN", NAN_POLICIES, "A NaN or infinite training loss.")
    if choice.config.distributed:
        st.caption("Runner: torchrun, which starts a process for each rank.")
    else:
        select(
            "runner",
            "Runner",
            RUNNERS,
            "A child process starts slower, but the page cannot slow it down.",
        )
    number("threads", "CPU threads", "Threads of one CPU operation; 0 is half of the cores.")
    current = st.session_state.get("config_resume", "")
    options = ["", *dict.fromkeys([*([current] if current else []), *checkpoints])]
    st.selectbox(
        "Resume from",
        options,
        key="config_resume",
        format_func=lambda name: name or "Nothing: start anew",
        help="A checkpoint of an earlier run with the same workload; epochs count on from it. Its "
        "weights, optimizer state, schedule and random numbers go on; a learning rate that you "
        "change counts from here on.",
    )
