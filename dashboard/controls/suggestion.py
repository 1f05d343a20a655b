"""A setting that a verdict proposes: whether it is possible, and putting it into the sidebar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from dashboard.controls.sidebar import load
from trainer.config import FIELDS, ConfigError, RunConfig
from trainer.config_validation import TrainDevice, choice_problem

NOT_PROPOSED = ("workload", "device", "resume", "runner")


def is_possible(
    name: str, value: Any, config: Mapping[str, Any], devices: Sequence[TrainDevice]
) -> bool:
    """Say whether a run of this configuration could have a setting on these devices."""
    try:
        current = RunConfig.from_dict(config)
    except ConfigError:  # of another version, or not ours
        return False
    return choice_problem(name, value, current, devices) is None


def describes(settings: RunConfig, config: Mapping[str, Any]) -> bool:
    """Say whether the sidebar's settings are for what a run of this configuration trains."""
    return (settings.workload, settings.device) == (config.get("workload"), config.get("device"))


def take_proposal(wanted: Any, of_run: Mapping[str, Any] | None = None) -> None:
    """Put a setting that the browser names into the sidebar, which says where it cannot run.

    `of_run` is the configuration of a run that the sidebar does not describe: it is taken over as
    well. Call it before the sidebar is drawn. Raises ValueError for what is no setting.
    """
    name = wanted.get("field") if isinstance(wanted, dict) else None
    if name not in FIELDS or name in NOT_PROPOSED:
        raise ValueError(f"field: must be a setting, got {str(name)[:40]!r}. Reload the page.")
    checked = replace(RunConfig(), **{name: wanted.get("value")})
    if of_run is not None:
        load(RunConfig.from_dict(of_run))
    st.session_state[f"config_{name}"] = getattr(checked, name)
