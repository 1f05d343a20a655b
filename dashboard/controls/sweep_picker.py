"""Which sweep the lab shows; its id is in the session's state and in the URL (`?sweep=`)."""

from __future__ import annotations

import time

import streamlit as st

from dashboard.controls.lab_labels import workload_and_device
from dashboard.controls.run_picker import distinct
from dashboard.format import escape_markdown
from dashboard.services import Services
from dashboard.sweeps import EXAMPLE, StoredSweep

SWEEP = "lab_sweep"
_NEXT = "lab_sweep_next"


def picked_sweep(server: Services) -> str | None:
    """Draw the list of sweeps, where there is more than none; return the one to show.

    One that is asked for and not there is named in a sentence. One that was just started or is in
    the URL wins, then the one chosen before, then the one that runs, then the newest of this
    server's. An example is shown only when chosen.
    """
    state, sweeps = st.session_state, server.sweeps.list_sweeps()
    known = {sweep.id: sweep for sweep in sweeps}
    own = [sweep.id for sweep in sweeps if sweep.look_only != EXAMPLE]
    first = next((sweep.id for sweep in sweeps if sweep.live), own[0] if own else None)
    asked = state.pop(_NEXT, None) or state.get(SWEEP) or st.query_params.get("sweep")
    if asked and asked not in known:
        name = escape_markdown(str(asked)[:80])
        st.warning(f"The sweep {name} no longer exists.", icon=":material/link_off:")
    chosen = asked if asked in known else state.get("kept_lab_sweep")
    state[SWEEP] = chosen if chosen in known else first
    if own or state[SWEEP] is not None:
        names = distinct({sweep.id: label(sweep) for sweep in sweeps})
        st.selectbox(
            "Sweep",
            list(known),
            format_func=names.__getitem__,
            key=SWEEP,
            label_visibility="collapsed",
            help="Earlier sweeps, newest first.",
        )
    picked: str | None = state[SWEEP]
    state["kept_lab_sweep"] = picked
    if picked is None:
        st.query_params.pop("sweep", None)
    elif st.query_params.get("sweep") != picked:
        st.query_params["sweep"] = picked
    return picked


def show_sweep(sweep_id: str | None) -> None:
    """Show this sweep from the next script run on; None: whatever comes first."""
    st.session_state[_NEXT] = sweep_id
    if sweep_id is None:
        for key in (SWEEP, "kept_lab_sweep"):
            st.session_state.pop(key, None)
        st.query_params.pop("sweep", None)


def label(sweep: StoredSweep) -> str:
    """Return what a sweep is called in the list.

    "Digits, MLP on CPU · 22 Nov 06:15 · finished · 6 settings"
    """
    content = sweep.content
    when = time.strftime("%d %b %H:%M", time.localtime(content.created))
    count = len(content.arms) or len(content.plan.arms)
    settings = f"{count} setting{'' if count == 1 else 's'}"
    # Said the same from the start to the end of a sweep: the list is not drawn with each sample.
    status = "running" if sweep.live else str(content.status)
    name = workload_and_device(content.workload, content.config)
    if sweep.look_only == EXAMPLE:
        name = f"Example: {name}"
    return " · ".join([name, when, status, settings])
