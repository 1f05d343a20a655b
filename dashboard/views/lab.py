"""The Lab page: select settings, measure their effect, and apply the best ones."""

import functools

import streamlit as st

from dashboard import services
from dashboard.controls import sidebar as controls
from dashboard.controls.lab_form import lab_form
from dashboard.controls.run_picker import newest_live
from dashboard.format import escape_markdown
from dashboard.views import lab_panel as panel
from dashboard.views.live_panel import terminal_command
from dashboard.views.parts import devices, start_button

SWEEP = services.ServerActivity.SWEEP
POLL_S = 3.0
SCRIPT_COMMANDS = ("tune train.py", "lab --variant tf32 train.py")

server = services.get()
found = devices(server)
controls.load_settings(found)
form = controls.sidebar(found, "Baseline", "The settings that the others are compared with.")
controls.write_link(form.config, found.devices)

with st.container(key="lab"):
    left, right = st.columns([3, 7], gap="medium")
with left, st.container(key="lab_choice"):
    with st.expander("A script of mine", icon=":material/terminal:", key="lab_script"):
        st.markdown(
            "Run one of these in a terminal. The script stays unchanged, and the sweep "
            "appears here. The first searches for the fastest settings and writes a patch."
        )
        for words in SCRIPT_COMMANDS:
            st.code(terminal_command(server.runs, words), language=None, wrap_lines=True)
    choice = lab_form(form, found.devices)
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
if pressed:
    start = functools.partial(server.sweeps.start, choice.plan)
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
