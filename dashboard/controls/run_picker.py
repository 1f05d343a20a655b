"""Which run the page shows; `st.session_state[RUN]` is its id."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import streamlit as st

from dashboard.controls.run_labels import labels
from dashboard.run_index import RunList
from dashboard.services import Services
from stepscope.run import RunInfo, is_run_id, read_only_reason

RUN = "run"
_CHOSEN = "run_chosen"
_ENDED = "run_ended_when_shown"


def picked_run(server: Services, listing: RunList) -> str | None:
    """Return the id of the run to show; None for none.

    A run that the user or the URL chose stays. Otherwise it is the active run, the newest live one
    of this machine, or the newest one; the latter gives way to a run that begins.
    """
    state = st.session_state
    if RUN not in state and "run" in st.query_params:
        state[RUN], state[_CHOSEN] = st.query_params["run"], True
    picked: str | None = state.get(RUN)
    if not state.get(_CHOSEN) and picked in (None, state.get(_ENDED)):
        live = server.active_id() or newest_live(listing.runs)
        newest = listing.runs[0].id if listing.runs else None
        state[RUN] = picked = live or picked or newest
        state[_ENDED] = None if live else picked
    return picked


def choices(picked: str | None, listing: RunList) -> list[tuple[str, str]]:
    """Return the ids and labels to choose from: live runs first, then the newest."""
    names = labels(listing.runs)
    if picked and picked not in names:
        names = {picked: picked, **names}  # of an older run, or of one that is not there
    return list(names.items())


def choose(run_id: str | None) -> None:
    """Show this run from now on, none for None or "": as somebody chose."""
    if not run_id or is_run_id(run_id):
        st.session_state[RUN] = run_id or None
        st.session_state[_CHOSEN] = True


def newest_live(runs: Sequence[RunInfo]) -> str | None:
    """Return the newest live run of this machine, those of this user first."""
    here = [run for run in runs if run.status.live and run.run_json.get("host") == _HOST]
    here.sort(key=lambda run: (read_only_reason(run) is None, run.created), reverse=True)
    return here[0].id if here else None


_HOST = socket.gethostname()
