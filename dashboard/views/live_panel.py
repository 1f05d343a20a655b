"""The buttons and the live charts: the part of the page that a click runs again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from dashboard.charts.content import run_content
from dashboard.charts.layout import layout
from dashboard.controls.command_bar import PENDING, STARTED, command_bar, send_asked, show_error
from dashboard.live_chart import live_chart, runs_watch
from dashboard.services import Services
from stepscope.run import RunError, RunInfo, read_run
from trainer.config import Problem, RunConfig


@st.fragment
def live_panel(
    server: Services,
    config: RunConfig,
    problems: Sequence[Problem],
    folder: Path | None,
    page_token: str,
) -> None:
    """Draw the buttons and, for a run, its charts; `page_token` names what is around them.

    A fragment, because a click must be answered while training holds the interpreter most of the
    time: running the sidebar again would take five times as long.
    """
    if st.session_state.pop(STARTED, False):
        st.rerun()  # the whole page: it has another run to show
    run = _read(folder)
    buttons = st.container()
    if run is not None:
        result = live_chart(
            run.id,
            layout(run_content(run)),
            key="live",
            page_token=page_token,
            pending_command=st.session_state.get(PENDING),
        )
    else:
        result = runs_watch(page_token, key="runs")
    if result.stale:
        # A run began or ended, or this one has more to show: the whole page is of before.
        st.rerun()
    # After the charts, whose message holds the answer to the click.
    with buttons:
        command_bar(server, config, problems, run)
    send_asked(run)


def _read(folder: Path | None) -> RunInfo | None:
    try:
        return read_run(folder) if folder else None
    except RunError as error:
        show_error(str(error))
        return None
