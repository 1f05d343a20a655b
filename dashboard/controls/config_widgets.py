"""One field of RunConfig as a widget: its bounds, its help, and why it cannot have a value.

Values live in `st.session_state` under `config_<field>`. What can be on offer is judged by
`trainer.config_validation`; its reason stands beside the widget that it disables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard.format import named_reason
from trainer.config import Problem, RunConfig
from trainer.config_limits import LIMITS
from trainer.config_validation import TrainDevice, choice_problem
from trainer.techniques import BY_FIELD

LEAST_USE: dict[str, Any] = {"num_workers": 1, "accumulation": 2, "clip_norm": 1.0}
"""The smallest value with which a number that can be off is in use."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the sidebar says now and what it may choose from: decides which widgets are usable."""

    config: RunConfig
    devices: Sequence[TrainDevice]

    def refusal(self, field: str, value: Any) -> Problem | None:
        """Return why `field` could not be `value` with the rest as it is."""
        return choice_problem(field, value, self.config, self.devices)


def number(name: str, label: str, text: str, *, disabled: bool = False) -> None:
    """Draw a number within the field's limits."""
    low, high = LIMITS[name]
    whole = isinstance(getattr(RunConfig(), name), int)
    small = name == "learning_rate"
    bounds: dict[str, Any] = {
        "min_value": int(low) if whole else float(low),
        "max_value": int(high) if whole else float(high),
        "step": 1 if whole else 1e-4 if small else 0.1,
        "format": "%d" if whole else "%.3g" if small else "%.2f",
    }
    st.number_input(label, key=f"config_{name}", help=text, disabled=disabled, **bounds)


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


def reason(problem: Problem, name: str | None = None, *, chosen: bool = True) -> None:
    """Say why something cannot be had, and what to do about it.

    What is not chosen need not be taken back: of its remedies only the others are said.
    """
    said = named_reason(name, problem.reason) if name else problem.reason
    own = problem.remedy.startswith("Switch it ")
    remedy = f" {problem.remedy}." if chosen or not own else ""
    st.caption(f":material/block: {said}.{remedy}")


def switch(name: str, choice: Choice) -> None:
    """Draw a technique that is on or off, disabled with the reason where it cannot be otherwise.

    One that cannot be as it is now stays usable, so that it can be switched back.
    """
    about = BY_FIELD[name]
    value = bool(getattr(choice.config, name))
    wrong, refused = choice.refusal(name, value), choice.refusal(name, not value)
    fixed = wrong is None and refused is not None
    st.toggle(about.label, key=f"config_{name}", help=about.help, disabled=fixed)
    problem = wrong or refused
    if problem is not None:
        reason(problem, chosen=wrong is not None)


def switch_number(name: str, choice: Choice) -> None:
    """Draw a technique that has an amount, disabled with the reason where it cannot be used."""
    about = BY_FIELD[name]
    off, value = getattr(RunConfig(), name), getattr(choice.config, name)
    refused = choice.refusal(name, value if value != off else LEAST_USE.get(name, off + 1))
    number(name, about.label, about.help, disabled=refused is not None and value == off)
    if refused is not None:
        reason(refused, chosen=value != off)


def switch_select(
    name: str,
    options: Mapping[Any, str],
    choice: Choice,
    on_change: Callable[[], None] | None = None,
) -> None:
    """Draw a technique of several kinds; those that cannot be are named below with the reason.

    Streamlit cannot disable one option of a list.
    """
    about = BY_FIELD[name]
    refused = {kind: choice.refusal(name, kind) for kind in options}
    value = getattr(choice.config, name)
    possible = {k: label for k, label in options.items() if refused[k] is None or k == value}
    select(name, about.label, possible, about.help, on_change)
    named: dict[Problem, list[str]] = {}
    for kind, problem in refused.items():
        if problem is not None:
            named.setdefault(problem, []).append(options[kind])
    for problem, labels in named.items():
        reason(problem, ", ".join(labels))
