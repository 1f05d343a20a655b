"""The lab's choice in the address of its page, so that it is there after a reload.

Written by whoever may have typed it: what is not among the offers is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import streamlit as st

from stepscope.run.setting_names import EARLIER_WORKLOADS, current_variant

BOXES = {"on": "lab_workload", "baseline": "lab_baseline", "preset": "lab_preset"}
"""Parameters of the address, and the widgets whose value they are."""
TICKS = "ticks"
_TAKEN = "lab_link_taken"
_TICKED = "lab_link_ticks"
_BETWEEN = "~"  # Between two ticks: names of arms have commas, plus and equals signs.


def take_boxes(offered: Mapping[str, Collection[str]]) -> bool:
    """Once a session, put what the address says into the widgets; say whether it names a workload.

    `offered` are the values that each parameter may have.
    """
    if st.session_state.get(_TAKEN):
        return False
    st.session_state[_TAKEN] = True
    params = st.query_params
    for name, key in BOXES.items():
        value = params.get(name)
        value = EARLIER_WORKLOADS.get(value, value) if name == "on" and value else value
        if value in offered[name]:
            st.session_state[key] = value
    st.session_state[_TICKED] = [
        current_variant(name) for name in params.get(TICKS, "").split(_BETWEEN)
    ]
    return st.session_state.get(BOXES["on"]) in offered["on"] and "on" in params


def ticks_of_link() -> list[str]:
    """Return the names of the arms that the address ticks; the second time none."""
    found: list[str] = st.session_state.pop(_TICKED, [])
    return found


def keep(ticked: Iterable[str]) -> None:
    """Write the choice of now into the address."""
    state = st.session_state
    wanted = {name: str(state.get(key) or "") for name, key in BOXES.items()}
    wanted[TICKS] = _BETWEEN.join(ticked)
    for name, value in wanted.items():
        if not value:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != value:
            st.query_params[name] = value
