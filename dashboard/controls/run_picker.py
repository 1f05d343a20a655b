"""The list of runs at the top of the page, and which one is shown.

`st.session_state["run"]` is the shown run's id. The list box has a key of its own: Streamlit knows
its options by their labels, and those change when a run ends.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import streamlit as st

from dashboard.controls.run_labels import labels
from dashboard.run_index import Listing
from dashboard.services import Services
from stepscope.run import RunInfo, is_run_id, read_only_reason

RUN = "run"
_BOX = "run_box"
_DRAWN = "run_drawn"
_CHOSEN = "run_chosen"


def run_picker(server: Services, listing: Listing) -> str | None:
    """Draw the title and the list of runs; return the picked run's id, None for none.

    A run named in the URL wins, then the active one, then the newest live one of this machine; an
    empty page takes the next one that begins, unless somebody emptied it by hand.
    """
    state = st.session_state
    if RUN not in state:
        state[RUN] = st.query_params.get("run")
    if not state[RUN] and not state.get(_CHOSEN):
        state[RUN] = server.active_id() or newest_live(listing.runs)
    picked: str | None = state[RUN]
    names = labels(listing.runs)
    if picked and picked not in names:
        names = {picked: picked, **names}  # of an older run, or of one that is not there
    title, picker = st.columns([1, 3], vertical_alignment="bottom")
    title.markdown("### Stepscope")
    if names:
        _keep_selection(picked, names)
        picker.selectbox(
            "Run",
            list(names),
            key=_BOX,
            index=None,
            placeholder="Choose a recorded run",
            format_func=lambda run_id: names.get(run_id, run_id),
            on_change=_choose,
            label_visibility="collapsed",
            help="Live runs first, then the newest.",
        )
    return picked


def newest_live(runs: Sequence[RunInfo]) -> str | None:
    """Return the newest live run of this machine, those of this user first."""
    here = [run for run in runs if run.status.live and run.run_json.get("host") == _HOST]
    here.sort(key=lambda run: (read_only_reason(run) is None, run.created), reverse=True)
    return here[0].id if here else None


def _keep_selection(picked: str | None, names: dict[str, str]) -> None:
    """Tell the browser of the selection where it has another one, or knows it by an old label."""
    drawn = (picked, names.get(picked or ""))
    if st.session_state.get(_DRAWN) != drawn or st.session_state.get(_BOX) != picked:
        st.session_state[_BOX] = picked
        st.session_state[_DRAWN] = drawn


def _choose() -> None:
    chosen = st.session_state[_BOX]
    # A label that has just changed is not found: Streamlit then gives the label for the value.
    if chosen is None or is_run_id(chosen):
        st.session_state[RUN] = chosen
        st.session_state[_CHOSEN] = True


_HOST = socket.gethostname()
