"""The lab: choose settings, measure what each is worth here, and take the best into the sidebar."""

import streamlit as st

from dashboard import services
from dashboard.controls import sidebar as controls
from dashboard.controls.lab_form import settings_of_sidebar, wanted
from dashboard.controls.run_picker import newest_live
from dashboard.controls.sweep_picker import picked_sweep, show_sweep
from dashboard.format import escape_markdown
from dashboard.views.lab_panel import ERROR, empty_lab, rerun_once, sweep_panel
from dashboard.views.parts import start_button
from stepscope.run import RunError
from trainer.lab.folder import SweepError

server = services.get()
if not server.devices_known:
    with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
        server.devices()
found = server.devices()
controls.load_settings(found)
controls.keep_settings()

with st.container(key="lab"):
    left, right = st.columns([3, 7], gap="medium")
with left, st.container(key="lab_choice"):
    choice = wanted(server, found, settings_of_sidebar())
    busy = server.busy_reason(services.ServerActivity.SWEEP)
    refused = busy or choice.refused
    text = "Measure the selected settings, one process per trial."
    pressed = start_button(
        "Start sweep", refused, text, choice.place, width="stretch", key="lab_start"
    )
    other = newest_live(server.list_runs())
    if other is not None and other != server.active_id():
        choice.place.caption(
            f":material/warning: Run {escape_markdown(other)} is live on this machine and will "
            "disturb the measurement."
        )
rerun_once(lambda: server.busy_reason(services.ServerActivity.SWEEP) != busy)
# Not in a callback: it would have the settings of the last time that the page was drawn.
if pressed:
    try:
        show_sweep(server.start_sweep(choice.plan))
    except (RunError, SweepError, OSError) as error:
        st.session_state[ERROR] = f"The sweep could not start. {error}"
    st.rerun()

with right, st.container(key="lab_results"):
    shown = picked_sweep(server)
    trouble = st.session_state.pop(ERROR, None)
    if trouble is not None:
        st.error(trouble, icon=":material/error:")
    if shown is None:
        empty_lab(server)
    else:
        sweep_panel(server, shown)
