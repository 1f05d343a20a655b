"""The Lab page: select settings, measure their effect here, and apply the best ones."""

import functools

import streamlit as st

from dashboard import services
from dashboard.controls import sidebar as controls
from dashboard.controls.lab_form import settings_of_sidebar, workload_form
from dashboard.controls.run_picker import newest_live
from dashboard.controls.script_form import script_form
from dashboard.format import escape_markdown, segments
from dashboard.views import lab_panel as panel
from dashboard.views.parts import devices, start_button

SWEEP = services.ServerActivity.SWEEP
POLL_S = 3.0
MY_SCRIPT = "My script"
WORKLOADS = ("Built-in workload", MY_SCRIPT)

server = services.get()
found = devices(server)
controls.load_settings(found)
controls.keep_settings()

with st.container(key="lab"):
    left, right = st.columns([3, 7], gap="medium")
with left, st.container(key="lab_choice"):
    measured = segments(
        "What to measure",
        WORKLOADS,
        "lab_what",
        help="Training code of Stepscope, or a script of yours, which is not changed.",
        persist_state="session",
    )
    if measured == MY_SCRIPT:
        choice = script_form(found.simulated)
    else:
        choice = workload_form(found, settings_of_sidebar())
    busy = server.busy_reason(SWEEP)
    pressed = start_button(
        "Start sweep",
        busy or choice.refused,
        "Measure the selection, one process per trial.",
        choice.place,
        width="stretch",
        key="lab_start",
    )
    other = newest_live(server.run_list.fresh().runs)
    if other is not None and other != server.active_id():
        choice.place.caption(
            f":material/warning: Run {escape_markdown(other)} is live on this machine and will "
            "disturb the measurement."
        )


@st.fragment(run_every=POLL_S)
def watch_others() -> None:
    """Run the page again once another activity has begun or ended."""
    if server.busy_reason(SWEEP) != busy:
        st.rerun()


watch_others()
# Not in a callback: it would have the settings of the script run before.
if pressed and (plan := choice.plan) is not None:
    start = functools.partial(server.sweeps.start, plan, choice.words)
    panel.attempt("The sweep could not start", lambda: panel.show_sweep(server.begin(SWEEP, start)))

with right, st.container(key="lab_results"):
    shown = panel.picked_sweep(server)
    trouble = st.session_state.pop(panel.ERROR, None)
    if trouble is not None:
        st.error(trouble, icon=":material/error:")
    if shown is None:
        panel.empty_lab(server)
    else:
        panel.sweep_panel(server, shown)
