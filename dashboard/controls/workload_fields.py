"""The fields of single workloads, drawn below the choice of the workload."""

from __future__ import annotations

import streamlit as st

from dashboard.controls.config_widgets import TEXTS, number, problem_caption, select
from stepscope.common.config_issue import ConfigIssue
from trainer import custom_workload as custom
from trainer.config import LIMITS, RunConfig, Workload
from trainer.config_validation import TRAITS
from trainer.datasets import data_problem, data_root, data_sets

CAPTIONS = {
    Workload.IMAGES: "Images from a CSV file or class folders, decoded again every epoch.",
    Workload.GPT: "Real text: Python's own help pages. The sizes below set the memory use.",
    Workload.RESNET: "Synthetic images: for measuring speed and memory.",
    Workload.MATMUL: "Multiplies two square matrices; no data loading.",
    Workload.MEMORY_STRESS: "Synthetic images. Width and image size set the memory use.",
}


def offered(chosen: Workload) -> list[Workload]:
    """Return the workloads to choose from: the custom one only if given, or `chosen`."""
    try:
        given = custom.user_workload() is not None
    except custom.UserWorkloadError:
        given = True  # its file is gone: `absent` has the reason
    return [one for one in Workload if one is not Workload.CUSTOM or given or one is chosen]


def absent(config: RunConfig) -> tuple[ConfigIssue, ...]:
    """Return the files that this workload lacks."""
    found = (data_problem(config), custom.user_problem(config))
    return tuple(problem for problem in found if problem is not None)


def workload_fields(config: RunConfig) -> None:
    """Draw the fields of the chosen workload: numbers first, two per row."""
    if config.workload in CAPTIONS:
        st.caption(CAPTIONS[config.workload])
    names = TRAITS[config.workload].fields
    if "custom_options" in names:
        _custom_options(config)
    if "dataset" in names:
        _dataset(config)
    numbers = [name for name in names if name in LIMITS]
    for first in range(0, len(numbers), 2):
        for column, name in zip(st.columns(2), numbers[first : first + 2], strict=False):
            with column:
                number(name)
    for name in names:
        if isinstance(getattr(config, name), bool):
            label, text = TEXTS[name]
            st.toggle(label, key=f"config_{name}", help=text)


def _dataset(config: RunConfig) -> None:
    """Draw the choice of a dataset, or how to get one."""
    names = sorted({config.dataset, *data_sets(data_root())})
    select("dataset", {name: name or "No dataset selected" for name in names})
    problem = data_problem(config)
    if problem is not None:
        problem_caption(problem)


def _custom_options(config: RunConfig) -> None:
    """Draw the file of the custom workload, and a switch for each of its options."""
    problem = custom.user_problem(config)
    if problem is not None:
        problem_caption(problem)
    try:
        given, settings = custom.user_workload(), custom.user_workload_settings()
    except custom.UserWorkloadError:
        return
    if given is not None:
        st.caption(f"`{given}`, set at server start.")
    for name, text in settings.items():
        st.session_state[f"own_{name}"] = config.has(name)
        st.toggle(name, key=f"own_{name}", help=text, on_change=_switch_option, args=(name,))


def _switch_option(name: str) -> None:
    """Add a custom option to `custom_options`, the names that are on, or remove it."""
    state = st.session_state
    on = [each for each in str(state.config_custom_options).split(",") if each and each != name]
    state.config_custom_options = ",".join([*on, name] if state[f"own_{name}"] else on)
