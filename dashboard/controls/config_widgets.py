"""Widgets of RunConfig fields: label, help, range, and why a value is unsupported.

Values live in `st.session_state` under `config_<field>`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from dashboard.format import named_reason, note
from stepscope.common.config_issue import ConfigIssue
from trainer.config import SETTINGS, RunConfig, Workload, limits_of
from trainer.training.config_validation import TrainDevice, choice_problem
from trainer.workloads import custom_file as custom
from trainer.workloads.datasets import data_problem, data_root, data_sets

LEAST_USE = {
    "num_workers": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "devices_per_node": 2,
}
"""The smallest value that turns on a number whose default is off."""
DEFAULTS = RunConfig()


@dataclass(frozen=True, slots=True)
class SidebarState:
    """The settings of the sidebar and the devices to choose from."""

    config: RunConfig
    devices: Sequence[TrainDevice]

    def refusal(self, field: str, value: Any) -> ConfigIssue | None:
        """Return why `field` could not have `value` with the other settings unchanged."""
        return choice_problem(field, value, self.config, self.devices)


def switch_or_number(name: str, state: SidebarState) -> None:
    """Draw a setting that is on or off, or a number.

    It is disabled with the reason if it is off and cannot be turned on. The reason why its present
    value is unsupported is below it.
    """
    value = getattr(state.config, name)
    problem = state.refusal(name, value)
    other: bool | float | None = None
    if isinstance(value, bool):
        other = not value
    elif value == getattr(DEFAULTS, name):
        other = LEAST_USE.get(name)
    refused = None if other is None else state.refusal(name, other)
    if isinstance(value, bool):
        toggle(name, refused)
    else:
        number(name, refused)
    if problem is not None:
        problem_caption(problem)


def toggle(name: str, refused: ConfigIssue | None = None) -> None:
    """Draw a setting that is on or off, disabled if `refused`."""
    st.toggle(
        SETTINGS[name].label,
        key=f"config_{name}",
        help=_help(name, refused),
        disabled=refused is not None,
    )


def number(name: str, refused: ConfigIssue | None = None) -> None:
    """Draw a number, disabled if `refused`.

    A value outside the limits is kept and shown with its range: `min_value` would ignore it.
    """
    label = SETTINGS[name].label
    low, high = limits_of(name)
    step, number_format = 0.1, "%.2f"
    if isinstance(getattr(DEFAULTS, name), int):
        step, number_format = 1, "%d"
    elif name == "learning_rate":
        step, number_format = 1e-4, "%.3g"
    value = st.number_input(
        label,
        key=f"config_{name}",
        help=_help(name, refused),
        disabled=refused is not None,
        step=step,
        format=number_format,
    )
    if not low <= value <= high:
        st.caption(f":red[{label} must be {low:,.15g} to {high:,.15g}.]")


def _help(name: str, refused: ConfigIssue | None) -> str:
    text = SETTINGS[name].help
    return text if refused is None else f"{text}\n\nDisabled: {refused.reason}."


def select(
    name: str,
    options: Mapping[Any, str],
    on_change: Callable[[], None] | None = None,
    reasons: Sequence[str] = (),
) -> None:
    """Draw a choice of values by label; `reasons` follow the help."""
    st.selectbox(
        SETTINGS[name].label,
        list(options),
        key=f"config_{name}",
        format_func=options.__getitem__,
        help="\n".join([SETTINGS[name].help, "", *reasons]).strip(),
        on_change=on_change,
    )


def supported_select(
    name: str, state: SidebarState, on_change: Callable[[], None] | None = None
) -> None:
    """Draw the supported values; a line names the others: Streamlit cannot disable one option."""
    value = getattr(state.config, name)
    supported: dict[Any, str] = {}
    others: dict[str, str] = {}
    for option, label in SETTINGS[name].choices.items():
        problem = state.refusal(name, option)
        if problem is None or option == value:
            supported[option] = label
        else:
            others[label] = f"- {named_reason(label, problem.reason)}."
    select(name, supported, on_change, list(others.values()))
    present = state.refusal(name, value)
    if present is not None:
        problem_caption(present)
    if others:
        device = "CPU" if state.config.device == "cpu" else "this device"
        st.caption(f"Not available on {device}: {', '.join(others)}.")


def problem_caption(problem: ConfigIssue) -> None:
    """Draw why a setting is unsupported, and the fix."""
    note("block", f"{problem.reason}. {problem.remedy}.")


NOT_PROPOSED = ("workload", "device", "resume_from", "runner")


def take_proposal(wanted: Any) -> None:
    """Put a suggested setting into the sidebar, before it is drawn. Raises ValueError."""
    name = wanted.get("field") if isinstance(wanted, dict) else None
    if name not in SETTINGS or name in NOT_PROPOSED:
        raise ValueError(f"field: unknown setting {str(name)[:40]!r}. Reload the page.")
    checked = replace(DEFAULTS, **{name: wanted.get("value")})
    st.session_state[f"config_{name}"] = getattr(checked, name)


CAPTIONS = {
    Workload.IMAGES: "Images from a CSV file or class folders, decoded again every epoch.",
    Workload.GPT: "Real text: Python's own help pages. The sizes below set the memory use.",
    Workload.RESNET: "Synthetic images: for measuring speed and memory.",
    Workload.MEMORY_STRESS: "Synthetic images. Width and image size set the memory use.",
}


def offered(chosen: Workload) -> list[Workload]:
    """Return the workloads to choose from: the custom one only if given, or `chosen`."""
    given = os.environ.get(custom.VARIABLE)  # if its file is gone, `absent` has the reason
    return [one for one in Workload if one is not Workload.CUSTOM or given or one is chosen]


def absent(config: RunConfig) -> tuple[ConfigIssue, ...]:
    """Return the files that this workload lacks."""
    found = (data_problem(config), custom.user_problem(config))
    return tuple(problem for problem in found if problem is not None)


def workload_fields(config: RunConfig) -> None:
    """Draw the fields of the chosen workload: numbers first, two per row."""
    if config.workload in CAPTIONS:
        st.caption(CAPTIONS[config.workload])
    names = [name for name, about in SETTINGS.items() if config.workload in about.read_by]
    if config.workload is Workload.CUSTOM:
        _custom_workload(config)
    if "dataset" in names:
        _dataset(config)
    numbers = [name for name in names if SETTINGS[name].limits is not None]
    for first in range(0, len(numbers), 2):
        for column, name in zip(st.columns(2), numbers[first : first + 2], strict=False):
            with column:
                number(name)
    for name in names:
        if isinstance(getattr(config, name), bool):
            toggle(name)


def _dataset(config: RunConfig) -> None:
    names = sorted({config.dataset, *data_sets(data_root())})
    select("dataset", {name: name or "No dataset selected" for name in names})
    problem = data_problem(config)
    if problem is not None:
        problem_caption(problem)


def _custom_workload(config: RunConfig) -> None:
    """Draw the file of the custom workload, or its problem."""
    problem = custom.user_problem(config)
    if problem is not None:
        problem_caption(problem)
    else:
        st.caption(f"`{custom.user_workload()}`, set at server start.")
