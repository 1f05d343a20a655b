"""Widgets of RunConfig fields: label, help, range, and why a value is unsupported.

Values live in `st.session_state` under `config_<field>`; `trainer.config_validation` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from dashboard.format import named_reason, note, pick
from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer import custom_workload as custom
from trainer.config import SETTINGS, RunConfig, Workload, limits_of
from trainer.config_validation import TrainDevice, choice_problem
from trainer.datasets import data_problem, data_root, data_sets

# The smallest value that turns on a number whose default is off.
LEAST_USE = {"num_workers": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
DEFAULTS = RunConfig()


@dataclass(frozen=True, slots=True)
class SidebarState:
    """The settings of the sidebar and the devices to choose from."""

    config: RunConfig
    devices: Sequence[TrainDevice]

    def refusal(self, field: str, value: Any) -> ConfigIssue | None:
        """Return why `field` could not have `value` with the other settings unchanged."""
        return choice_problem(field, value, self.config, self.devices)


def number(name: str, *, refused: ConfigIssue | None = None, off: bool = True) -> None:
    """Draw a number, disabled while it is `refused` and `off`.

    A value outside the limits is kept and shown with its range: `min_value` would ignore it.
    """
    about = SETTINGS[name]
    low, high = limits_of(name)
    whole = isinstance(getattr(DEFAULTS, name), int)
    small = name == "learning_rate"
    disabled = refused is not None and off
    value = st.number_input(
        about.label,
        key=f"config_{name}",
        help=_disabled_help(about.help, refused if disabled else None),
        disabled=disabled,
        step=1 if whole else 1e-4 if small else 0.1,
        format="%d" if whole else "%.3g" if small else "%.2f",
    )
    if not low <= value <= high:
        st.caption(f":red[{about.label} must be {low:,.15g} to {high:,.15g}.]")
    elif refused is not None and not off:
        problem_caption(refused)


def select(
    name: str,
    options: Mapping[Any, str] | None = None,
    on_change: Callable[[], None] | None = None,
    reasons: Sequence[str] = (),
) -> None:
    """Draw a choice of values, by default all of the setting; `reasons` follow the help."""
    about = SETTINGS[name]
    text = "\n".join([about.help, "", *reasons]) if reasons else about.help
    options = about.choices if options is None else options
    pick(about.label, options, f"config_{name}", text, on_change=on_change)


def problem_caption(problem: ConfigIssue) -> None:
    """Draw why a setting is unsupported, and the fix."""
    note("block", f"{problem.reason}. {problem.remedy}.")


def _disabled_help(text: str, problem: ConfigIssue | None) -> str:
    return text if problem is None else f"{text}\n\nDisabled: {problem.reason}."


def switch(name: str, choice: SidebarState) -> None:
    """Draw a technique that is on or off; an unsupported one can only be turned off."""
    about = SETTINGS[name]
    value = bool(getattr(choice.config, name))
    wrong, refused = choice.refusal(name, value), choice.refusal(name, not value)
    fixed = refused if wrong is None else None
    help_text = _disabled_help(about.help, fixed)
    st.toggle(about.label, key=f"config_{name}", help=help_text, disabled=fixed is not None)
    if wrong is not None:
        problem_caption(wrong)


def switch_number(name: str, choice: SidebarState) -> None:
    """Draw a number that can be off, disabled if it is unsupported."""
    off, value = getattr(DEFAULTS, name), getattr(choice.config, name)
    refused = choice.refusal(name, value if value != off else LEAST_USE.get(name, off + 1))
    number(name, refused=refused, off=value == off)


def switch_select(
    name: str, choice: SidebarState, on_change: Callable[[], None] | None = None
) -> None:
    """Draw the supported values; a line names the others: Streamlit cannot disable one option."""
    options = SETTINGS[name].choices
    value = getattr(choice.config, name)
    refused = {
        kind: problem
        for kind in options
        if (problem := choice.refusal(name, kind)) is not None and kind != value
    }
    reasons = [f"- {named_reason(options[kind], one.reason)}." for kind, one in refused.items()]
    possible = {kind: label for kind, label in options.items() if kind not in refused}
    select(name, possible, on_change, reasons)
    chosen = choice.refusal(name, value)
    if chosen is not None:
        problem_caption(chosen)
    if refused:
        device = "CPU" if choice.config.device == "cpu" else "this device"
        st.caption(f"Not available on {device}: {', '.join(map(options.__getitem__, refused))}.")


NOT_PROPOSED = ("workload", "device", "resume_from", "runner")


def is_possible(
    name: str, value: Any, config: Mapping[str, Any], devices: Sequence[TrainDevice]
) -> bool:
    """Return True if a run of this configuration could have a setting on these devices."""
    try:
        current = RunConfig.from_dict(config)
    except ConfigError:  # settings of another version
        return False
    if devices and current.device not in {device.id for device in devices}:
        current = replace(current, device=devices[0].id)  # a run of another machine
    return choice_problem(name, value, current, devices) is None


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
    names = [name for name, about in SETTINGS.items() if config.workload in about.read_by]
    if "custom_options" in names:
        _custom_options(config)
    if "dataset" in names:
        _dataset(config)
    numbers = [name for name in names if SETTINGS[name].limits is not None]
    for first in range(0, len(numbers), 2):
        for column, name in zip(st.columns(2), numbers[first : first + 2], strict=False):
            with column:
                number(name)
    for name in names:
        if isinstance(getattr(config, name), bool):
            about = SETTINGS[name]
            st.toggle(about.label, key=f"config_{name}", help=about.help)


def _dataset(config: RunConfig) -> None:
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
