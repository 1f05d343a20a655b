"""One field of RunConfig as a widget: its bounds, its help, and why it cannot have a value.

Values live in `st.session_state` under `config_<field>`. `trainer.config_validation` decides what
can be chosen; the tooltip of a disabled widget gives its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from dashboard.format import named_reason
from trainer.config import FIELDS, LIMITS, ConfigError, ConfigIssue, RunConfig
from trainer.config_validation import TrainDevice, choice_problem
from trainer.techniques import BY_FIELD

LEAST_USE: dict[str, Any] = {
    "num_workers": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
}
"""The smallest value that turns on a number whose default is off."""


@dataclass(frozen=True, slots=True)
class SidebarState:
    """The settings of the sidebar and the devices to choose from."""

    config: RunConfig
    devices: Sequence[TrainDevice]

    def refusal(self, field: str, value: Any) -> ConfigIssue | None:
        """Return why `field` could not be `value` with the rest as it is."""
        return choice_problem(field, value, self.config, self.devices)


def number(
    name: str, label: str, text: str, *, refused: ConfigIssue | None = None, off: bool = True
) -> None:
    """Draw a number. `refused` is why it cannot be used, which disables it while it is `off`.

    A number outside the field's limits is kept and shown with its range: `min_value` of Streamlit's
    widget would ignore it without a message.
    """
    low, high = LIMITS[name]
    whole = isinstance(getattr(RunConfig(), name), int)
    small = name == "learning_rate"
    disabled = refused is not None and off
    value = st.number_input(
        label,
        key=f"config_{name}",
        help=_disabled_help(text, refused if disabled else None),
        disabled=disabled,
        step=1 if whole else 1e-4 if small else 0.1,
        format="%d" if whole else "%.3g" if small else "%.2f",
    )
    if not low <= value <= high:
        st.caption(f":red[{label}: must be between {low:,.15g} and {high:,.15g}.]")
    elif refused is not None and not off:
        problem_caption(refused)


def select(
    name: str,
    label: str,
    options: Mapping[Any, str],
    text: str,
    on_change: Callable[[], None] | None = None,
) -> None:
    """Draw a choice of one of these values, each with its label."""
    st.selectbox(
        label,
        list(options),
        format_func=options.__getitem__,
        key=f"config_{name}",
        help=text,
        on_change=on_change,
    )


def caption(icon: str, text: str) -> None:
    """Draw a sentence in small print with a Material icon."""
    st.caption(f":material/{icon}: {text}")


def problem_caption(problem: ConfigIssue) -> None:
    """Draw why a setting cannot be used, and what to do about it."""
    caption("block", f"{problem.reason}. {problem.remedy}.")


def _disabled_help(text: str, problem: ConfigIssue | None) -> str:
    return text if problem is None else f"{text}\n\nDisabled: {problem.reason}."


def switch(name: str, choice: SidebarState) -> None:
    """Draw a technique that is on or off, disabled if it cannot be changed.

    A setting that cannot be used but is on stays enabled, so that it can be turned off.
    """
    about = BY_FIELD[name]
    value = bool(getattr(choice.config, name))
    wrong, refused = choice.refusal(name, value), choice.refusal(name, not value)
    fixed = refused if wrong is None else None
    help_text = _disabled_help(about.help, fixed)
    st.toggle(about.label, key=f"config_{name}", help=help_text, disabled=fixed is not None)
    if wrong is not None:
        problem_caption(wrong)


def switch_number(name: str, choice: SidebarState) -> None:
    """Draw a technique that has an amount, disabled if it cannot be used."""
    about = BY_FIELD[name]
    off, value = getattr(RunConfig(), name), getattr(choice.config, name)
    refused = choice.refusal(name, value if value != off else LEAST_USE.get(name, off + 1))
    number(name, about.label, about.help, refused=refused, off=value == off)


def switch_select(
    name: str,
    options: Mapping[Any, str],
    choice: SidebarState,
    on_change: Callable[[], None] | None = None,
) -> None:
    """Draw a technique of several kinds, without those that cannot be used on this device.

    Streamlit cannot disable one option of a list: one line names the missing ones, and the tooltip
    gives the reasons.
    """
    about = BY_FIELD[name]
    refused = {kind: choice.refusal(name, kind) for kind in options}
    value = getattr(choice.config, name)
    possible = {k: label for k, label in options.items() if refused[k] is None or k == value}
    reasons = [
        f"- {named_reason(options[kind], problem.reason)}."
        for kind, problem in refused.items()
        if problem is not None and kind != value
    ]
    text = "\n".join([about.help, "", *reasons]) if reasons else about.help
    select(name, about.label, possible, text, on_change)
    chosen = refused.get(value)
    if chosen is not None:
        problem_caption(chosen)
    missing = [options[kind] for kind in options if kind not in possible]
    if missing:
        device = "CPU" if choice.config.device == "cpu" else "this device"
        st.caption(f"Not available on {device}: {', '.join(missing)}.")


NOT_PROPOSED = ("workload", "device", "resume_from", "runner")


def is_possible(
    name: str, value: Any, config: Mapping[str, Any], devices: Sequence[TrainDevice]
) -> bool:
    """Say whether a run of this configuration could have a setting on these devices."""
    try:
        current = RunConfig.from_dict(config)
    except ConfigError:  # of another version, or not ours
        return False
    return choice_problem(name, value, current, devices) is None


def take_proposal(wanted: Any) -> None:
    """Put a setting that the browser names into the sidebar; all other settings stay.

    Call it before the sidebar is drawn. Raises ValueError for an unknown field or value.
    """
    name = wanted.get("field") if isinstance(wanted, dict) else None
    if name not in FIELDS or name in NOT_PROPOSED:
        raise ValueError(f"field: unknown setting {str(name)[:40]!r}. Reload the page.")
    checked = replace(RunConfig(), **{name: wanted.get("value")})
    st.session_state[f"config_{name}"] = getattr(checked, name)
