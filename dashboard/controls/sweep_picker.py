"""The sweep that the lab shows; its id is in the session state and in the URL (`?sweep=`)."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from dashboard.controls.lab_labels import workload_and_device
from dashboard.controls.run_picker import distinct
from dashboard.format import escape_markdown, pick
from dashboard.services import Services
from dashboard.sweeps import EXAMPLE, StoredSweep

SWEEP = "lab_sweep"
_NEXT = "lab_sweep_next"


def picked_sweep(server: Services) -> str | None:
    """Draw the list of sweeps, if there are any; return the one to show.

    The order: one just started or in the URL, the one chosen before, the one that runs, the newest
    of this server. An example is shown only when chosen; an unknown one gives a warning.
    """
    state, sweeps = st.session_state, server.sweeps.list_sweeps()
    known = {sweep.id: sweep for sweep in sweeps}
    own = [sweep.id for sweep in sweeps if sweep.look_only != EXAMPLE]
    first = next((sweep.id for sweep in sweeps if sweep.live), own[0] if own else None)
    asked = state.pop(_NEXT, None) or state.get(SWEEP) or st.query_params.get("sweep")
    if asked and asked not in known:
        name = escape_markdown(str(asked)[:80])
        st.warning(f"The sweep {name} no longer exists.", icon=":material/link_off:")
    state[SWEEP] = asked if asked in known else first
    if own or state[SWEEP] is not None:
        names = distinct({sweep.id: label(sweep) for sweep in sweeps})
        more: Any = {"label_visibility": "collapsed", "persist_state": "session"}
        pick("Sweep", names, SWEEP, "Earlier sweeps, newest first.", **more)
    picked: str | None = state[SWEEP]
    if picked is None:
        st.query_params.pop("sweep", None)
    elif st.query_params.get("sweep") != picked:
        st.query_params["sweep"] = picked
    return picked


def show_sweep(sweep_id: str | None) -> None:
    """Show this sweep from the next script run on; None for the default one."""
    st.session_state[_NEXT] = sweep_id
    if sweep_id is None:
        st.session_state.pop(SWEEP, None)
        st.query_params.pop("sweep", None)


def label(sweep: StoredSweep) -> str:
    """Return a sweep's label, "Digits, MLP on CPU · 22 Nov 06:15 · finished · 6 settings"."""
    content = sweep.content
    when = time.strftime("%d %b %H:%M", time.localtime(content.created))
    count = len(content.arms) or len(content.plan.arms)
    # The same text until the sweep ends, so that the list is not redrawn with each trial.
    status = "running" if sweep.live else str(content.status)
    name = workload_and_device(content)
    if sweep.look_only == EXAMPLE:
        name = f"Example: {name}"
    return " · ".join([name, when, status, f"{count} setting{'' if count == 1 else 's'}"])
