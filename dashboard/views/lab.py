"""The Lab page: select settings, measure their effect here, and apply the best ones."""

import streamlit as st

from dashboard import services
from dashboard.controls import sidebar as controls
from dashboard.controls.lab_form import settings_of_sidebar, wanted
from dashboard.controls.run_picker import newest_live
from dashboard.controls.sweep_picker import picked_sweep, show_sweep
from dashboard.format import escape_markdown
from dashboard.views.lab_panel import ERROR, attempt, empty_lab, rerun_once, sweep_panel
from dashboard.views.parts import devices, start_button

SWEEP = services.ServerActivity.SWEEP

server = services.get()
found = devices(server)
controls.load_settings(found)
controls.keep_settings()

with st.container(key="lab"):
    left, right = st.columns([3, 7], gap="medium")
with left, st.container(key="lab_choice"):
    choice = wanted(server, found, settings_of_sidebar())
    busy = server.busy_reason(SWEEP)
    refused, about = busy or choice.refused, "Measure the selected settings, one process per trial."
    pressed = start_button(
        "Start sweep", refused, about, choice.place, width="stretch", key="lab_start"
    )
    other = newest_live(server.list_runs())
    if other is not None and other != server.active_id():
        choice.place.caption(
            f":material/warning: Run {escape_markdown(other)} is live on this machine and will "
            "disturb the measurement."
        )
rerun_once(lambda: server.busy_reason(SWEEP) != busy)
# Not in a callback: it would have the settings of the script run before.
if pressed:
    attempt(
        "The sweep could not start",
        lambda: show_sweep(server.begin(SWEEP, lambda: server.sweeps.start(choice.plan))),
    )

with right, st.container(key="lab_results"):
    shown = picked_sweep(server)
    trouble = st.session_state.pop(ERROR, None)
    if trouble is not None:
        st.error(trouble, icon=":material/error:")
    if shown is None:
        empty_lab(server)
    else:
        sweep_panel(server, shown)
