"""The header and the live charts: one component in the browser, and what it asks of this page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import streamlit as st

from dashboard.api.page_token import page_token
from dashboard.charts.content import run_content
from dashboard.charts.layout import layout
from dashboard.controls.actions import buttons, start_button
from dashboard.controls.run_picker import RUN, choices, choose
from dashboard.live_chart import live_chart
from dashboard.run_index import Listing
from dashboard.services import Services
from stepscope.run import RunError, RunInfo, read_only_reason
from trainer.config import Problem, RunConfig

ERROR = "command_error"
"""In the session's state: a sentence that the header shows once, as after a refused Start."""
KEY = "live"


def live_panel(
    server: Services,
    config: RunConfig,
    problems: Sequence[Problem],
    listing: Listing,
    run: RunInfo | None,
    trouble: str | None = None,
) -> None:
    """Draw the header row and, for a run, its charts; `trouble` says why the picked one is not
    there."""
    picked = st.session_state.get(RUN)
    error = st.session_state.pop(ERROR, None)
    header = {
        "runs": choices(picked, listing),
        "picked": picked,
        "start": start_button(server.active_id(), problems),
        "buttons": buttons(run),
        "look_only": read_only_reason(run) if run is not None and run.status.live else None,
        "trouble": trouble,
        # Numbered, so that the same sentence is shown again.
        "error": {"id": time.time_ns() // 1000, "text": error} if error else None,
    }
    live_chart(
        run.id if run else None,
        layout(run_content(run)) if run else None,
        header,
        key=KEY,
        page_token=page_token(listing, run),
        on_start=partial(_start, server, config),
        on_pick=_pick,
    )


def _start(server: Services, config: RunConfig) -> None:
    try:
        st.session_state[RUN] = server.start(config).name
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The run could not start. {error}"


def _pick() -> None:
    choose(st.session_state[KEY].run)
