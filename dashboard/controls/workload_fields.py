"""The fields that only some workloads have, drawn below the choice of the workload."""

from __future__ import annotations

import streamlit as st

from dashboard.controls.config_widgets import number, problem_caption
from trainer.config import LIMITS, ConfigIssue, RunConfig, Workload
from trainer.custom_workload import (
    UserWorkloadError,
    user_problem,
    user_workload,
    user_workload_settings,
)
from trainer.datasets import data_problem, data_root, data_sets
from trainer.workload_traits import TRAITS

CAPTIONS = {
    Workload.IMAGES: "Images from a CSV file or class folders, decoded again every epoch.",
    Workload.GPT: "Real text: Python's own help pages. The sizes below set the memory use.",
    Workload.RESNET: "Synthetic images: for measuring speed and memory.",
    Workload.MATMUL: "Multiplies two square matrices; no data loading.",
    Workload.MEMORY_STRESS: "Synthetic images. Width and image size set the memory use.",
}
FIELDS: dict[str, tuple[str, str]] = {
    "num_layers": ("Layers", "Transformer blocks; memory and time grow with them."),
    "width": ("Width", "Embedding size; memory grows with it."),
    "context_length": ("Context", "Characters the model sees at once; memory grows with it."),
    "dataset": (
        "Data",
        "Datasets in the data folder: CSV files with path,label, or one folder per class. Set "
        "STEPSCOPE_DATA before starting the server to choose another folder.",
    ),
    "image_size": ("Image size", "Pixels per side; memory grows with its square."),
    "num_classes": ("Classes", "Number of synthetic classes."),
    "dropout": ("Dropout", "Share of activations zeroed during training; 0 is off."),
    "tie_embeddings": (
        "Tie embeddings",
        "The output layer shares the embedding weights. Fewer parameters; may learn better or "
        "worse.",
    ),
    "horizontal_flip": (
        "Random flip",
        "Mirrors half of the training images. Turn it off where left and right matter, as in "
        "digits or text.",
    ),
    "skip_unreadable": (
        "Skip unreadable images",
        "Counts unreadable rows and images and skips them; otherwise the first one ends the run.",
    ),
}
"""Label and help of each field; its kind of widget follows from its type."""


def offered(chosen: Workload) -> list[Workload]:
    """Return the workloads to choose from; the user's own if one was given, or is `chosen`."""
    try:
        given = user_workload() is not None
    except UserWorkloadError:
        given = True  # its file is gone, which `absent` tells once it is chosen
    return [one for one in Workload if one is not Workload.CUSTOM or given or one is chosen]


def absent(config: RunConfig) -> tuple[ConfigIssue, ...]:
    """Return what this workload needs on the disk and does not find there."""
    found = (data_problem(config), user_problem(config))
    return tuple(problem for problem in found if problem is not None)


def workload_fields(config: RunConfig) -> None:
    """Draw what the chosen workload has beside the settings of all: numbers first, two a row."""
    if config.workload in CAPTIONS:
        st.caption(CAPTIONS[config.workload])
    names = TRAITS[config.workload].fields
    if "custom_options" in names:
        _own(config)
    if "dataset" in names:
        _data(config)
    numbers = [name for name in names if name in LIMITS]
    for first in range(0, len(numbers), 2):
        for column, name in zip(st.columns(2), numbers[first : first + 2], strict=False):
            with column:
                number(name, *FIELDS[name])
    for name in names:
        if isinstance(getattr(config, name), bool):
            label, text = FIELDS[name]
            st.toggle(label, key=f"config_{name}", help=text)


def _data(config: RunConfig) -> None:
    """Draw the choice of a data set, or say how to get one."""
    found = data_sets(data_root())
    options = found if config.dataset in found else [config.dataset, *found]
    label, text = FIELDS["dataset"]
    st.selectbox(
        label,
        options,
        key="config_dataset",
        format_func=lambda name: name or "No dataset selected",
        help=text,
    )
    problem = data_problem(config)
    if problem is not None:
        problem_caption(problem)


def _own(config: RunConfig) -> None:
    """Draw the user's own workload: which file it is, and a switch for each of its settings."""
    problem = user_problem(config)
    if problem is not None:
        problem_caption(problem)
    try:
        given, settings = user_workload(), user_workload_settings()
    except UserWorkloadError:
        return
    if given is not None:
        st.caption(f"`{given}`, set at server start.")
    for name, text in settings.items():
        st.session_state[f"own_{name}"] = config.has(name)
        st.toggle(name, key=f"own_{name}", help=text, on_change=_switch_own, args=(name,))


def _switch_own(name: str) -> None:
    """Put a switch's new position into `own`, which keeps the names that are on."""
    state = st.session_state
    on = [each for each in str(state.config_custom_options).split(",") if each and each != name]
    state.config_custom_options = ",".join([*on, name] if state[f"own_{name}"] else on)
