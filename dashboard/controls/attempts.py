"""A job that torchrun has started again: which attempt is shown, and what is said of the others.

The page follows from an attempt to the next one where somebody watches the job, and not where
somebody has chosen an old attempt from the list.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.controls.run_picker import RUN, choose
from dashboard.format import escape_markdown
from stepscope.common.formatting import printable
from stepscope.run import RunInfo, is_run_id, restart_expected

WATCHED = "watched_live"
"""In the session's state: the run that this page has shown while it was live."""


def next_attempt(run: RunInfo) -> str | None:
    """Return the attempt to show instead of this one, from now on; None to stay."""
    state = st.session_state
    if run.status.live or restart_expected(run):
        state[WATCHED] = run.id
    later = _named(run, "restarted_as")
    if later is None or state.get(WATCHED) != run.id:
        return None
    state[RUN] = state[WATCHED] = later
    return later


def attempts(run: RunInfo) -> None:
    """Say which attempt of a job this is, with a way to the one before and after."""
    before, after = _named(run, "restart_of"), _named(run, "restarted_as")
    sentence = restart_sentence(run.run_json)
    if restart_expected(run):
        st.caption(":material/restart_alt: torchrun is about to restart all ranks.")
    if before is None and after is None:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="attempts"):
        if sentence is not None:
            st.caption(f":material/restart_alt: {escape_markdown(sentence)}", width="stretch")
        elif after is not None:
            st.caption(
                ":material/restart_alt: torchrun restarted all ranks, in a new run.",
                width="stretch",
            )
        for name, label in ((before, "Previous attempt"), (after, "Next attempt")):
            if name is not None:
                st.button(
                    label,
                    key=f"attempt_{label.split()[0].lower()}",
                    type="tertiary",
                    on_click=choose,
                    args=(name,),
                    help="Each attempt is recorded as its own run.",
                )


def restart_sentence(run_json: dict[str, Any]) -> str | None:
    """Return why an attempt began and where it went on; None for a first attempt. Pure."""
    restart = run_json.get("restart")
    if not isinstance(restart, dict) or type(restart.get("number")) is not int:
        return None
    number, limit = restart["number"], restart.get("of")
    of = f" of {limit}" if type(limit) is int and limit else ""
    resumed = run_json.get("resumed")
    step = resumed.get("step") if isinstance(resumed, dict) else restart.get("step")
    where = f"resumed after step {step:,}" if type(step) is int else "starting from scratch"
    cause = printable(str(restart.get("cause") or "a rank failed"))[:300]
    return f"Restart {number}{of}: {cause}; {where}."


def _named(run: RunInfo, entry: str) -> str | None:
    name = run.run_json.get(entry)
    return name if isinstance(name, str) and is_run_id(name) else None
