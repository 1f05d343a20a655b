"""The header and the live charts: one component in the browser, and what it asks of this page."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.api.page_token import page_token
from dashboard.charts.layout import layout
from dashboard.charts.run_view import run_content, run_kind
from dashboard.controls.actions import Json, buttons, start_button
from dashboard.controls.run_picker import RUN, choices, choose
from dashboard.controls.sidebar import load
from dashboard.controls.suggestion import describes, take_proposal
from dashboard.live_chart import live_chart
from dashboard.out_of_memory import Retry, retry
from dashboard.run_index import Listing
from dashboard.services import Services
from stepscope.run import RunError, RunInfo, RunKind, read_only_reason
from trainer.config import Problem, RunConfig

ERROR = "command_error"
"""In the session's state: a sentence that the header shows once, as after a refused Start."""
START = "start_pressed"
"""In the session's state from a press on Start until a run is started."""
TAKEN_OVER = "settings_taken_over"
"""In the session's state: what the lab has put into the sidebar; said once."""
KEY = "live"


def start_if_pressed(server: Services, config: RunConfig, problems: Sequence[Problem]) -> None:
    """Start what the sidebar says now, if Start was pressed, and show that run.

    Not in the callback of the press: it would have the settings of the last time that the page was
    drawn, and who changes a setting and presses Start at once means the new one.
    """
    if not st.session_state.pop(START, False):
        return
    if problems:
        st.session_state[ERROR] = f"The run could not start. {problems[0]}"
        return
    try:
        st.session_state[RUN] = server.start(config).name
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The run could not start. {error}"
        return
    st.rerun()


def live_panel(
    server: Services,
    config: RunConfig,
    start: Json,
    listing: Listing,
    run: RunInfo | None,
    trouble: str | None = None,
) -> None:
    """Draw the header row and, for a run, its charts; `config` has the sidebar's settings,
    `start` is the button for them, `trouble` says why the picked run is not there."""
    picked = st.session_state.get(RUN)
    again = None if run is None else retry(run, server.devices().devices)
    error = st.session_state.pop(ERROR, None)
    other = _other_settings(config, run)
    header = {
        "runs": choices(picked, listing),
        "picked": picked,
        "start": start,
        "retry": None if again is None else again.as_button(busy(server)),
        "buttons": buttons(run),
        "look_only": read_only_reason(run) if run is not None and run.status.live else None,
        "trouble": trouble,
        # None: those of the shown run are not in the sidebar.
        "settings": config.to_dict() if other is None else None,
        # Numbered, so that the same sentence is shown again.
        "error": {"id": time.time_ns() // 1000, "text": error} if error else None,
    }
    live_chart(
        run.id if run else None,
        layout(run_content(run)) if run else None,
        header,
        key=KEY,
        page_token=page_token(listing, run, server.measuring()),
        on_start=_start_pressed,
        on_pick=_pick,
        on_setting=functools.partial(_take_setting, other),
        on_retry=functools.partial(_retry, again),
    )


def busy(server: Services) -> str | None:
    """Say why nothing can be started now, whatever its settings; None where something can."""
    told = start_button(server.active_id(), (), server.sweeps.active_id(), server.lesson_refusal())
    refused: str | None = told["refused"]
    return refused


def start_with(config: RunConfig) -> None:
    """Put settings into the sidebar and have Live start them, as by a press on Start there.

    Call it in a callback, or before a change to that page.
    """
    load(config)
    st.session_state.setdefault("link_problems", [])  # no link is followed any more
    st.session_state[START] = True


def _start_pressed() -> None:
    st.session_state[START] = True


def _retry(again: Retry | None) -> None:
    """Put the settings that need less memory into the sidebar, and start them."""
    if again is not None and again.config is not None:
        start_with(again.config)


def _pick() -> None:
    choose(st.session_state[KEY].run)


def _other_settings(config: RunConfig, run: RunInfo | None) -> Mapping[str, Any] | None:
    """Return the settings of a run of ours that the sidebar's, `config`, do not describe."""
    if run is None or run_kind(run) is not RunKind.TRAINER:
        return None
    settings = run.run_json.get("config")
    if not isinstance(settings, dict) or describes(config, settings):
        return None
    return settings


def _take_setting(of_run: Mapping[str, Any] | None) -> None:
    try:
        take_proposal(st.session_state[KEY].setting, of_run)
    except ValueError as error:
        st.session_state[ERROR] = f"The setting was not taken. {error}"
