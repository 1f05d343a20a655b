"""The table *Where the time goes* of a run's Overview: lines of the script by their time."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.format import note
from dashboard.views import parts
from stepscope.diagnosis.code_time import TABLE, LineShare, line_shares, table_note
from stepscope.run import RunInfo
from stepscope.session.training_facts import read_facts

REFRESH = "5s"  # Some 10 ms of the server's time, of which a training thread waits.
PERCENT = 100.0
COLUMNS = {
    "Time": st.column_config.ProgressColumn(
        min_value=0, max_value=100, format="%d%%", help="Share of the training thread's time."
    ),
    "±": parts.number(format="%d%%", help="95% interval of the share, from the number of samples."),
    "Phase": parts.text(
        help="Of the training step: data, forward, backward, optimizer; own code is what the "
        "script does between a step and the next batch."
    ),
    "Line": parts.text(width="medium", help="File and line of the script."),
    "Call": parts.text(width="large", help="The expression of this line that was executing."),
    "In": parts.text(help="The Python function that it had called; none for a function in C."),
    "Asleep": parts.number(
        format="%d%%", help="Share of this line's time in which the thread waited, without a core."
    ),
}


def code_lines(run: RunInfo) -> None:
    """Draw the table, again every few seconds while the run is live."""
    st.markdown(f"#### {TABLE}")
    st.fragment(_table, run_every=REFRESH if run.status.live else None)(run)


def _table(run: RunInfo) -> None:
    facts = read_facts(run.folder, 0)
    rows = [] if facts is None else line_shares(facts)
    if facts is None or not rows:
        note("schedule", "No samples yet: they begin with the third step.")
        return
    parts.table([_cells(row) for row in rows], COLUMNS, "code_lines", TABLE)
    st.caption(table_note(facts))


def _cells(row: LineShare) -> dict[str, Any]:
    _, phase, place, call, below = row.cells
    return {
        "Time": PERCENT * row.share,
        "±": PERCENT * row.error,
        "Phase": phase,
        "Line": place,
        "Call": call,
        "In": below,
        "Asleep": PERCENT * row.asleep,
    }
