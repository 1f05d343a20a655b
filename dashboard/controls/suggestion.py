"""A setting that a verdict proposes: whether it is possible, and putting it into the sidebar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from trainer.config import FIELDS, ConfigError, RunConfig
from trainer.config_validation import TrainDevice, choice_problem

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
