"""The live page: choose settings, start a run, watch it and act on it."""

from dataclasses import replace

import streamlit as st

from dashboard import services
from dashboard.charts.run_view import run_kind
from dashboard.controls import sidebar as controls
from dashboard.controls.actions import start_button
from dashboard.controls.attempts import attempts, next_attempt
from dashboard.controls.run_labels import run_name
from dashboard.controls.run_picker import picked_run
from dashboard.format import escape_markdown
from dashboard.views.empty_state import empty_page
from dashboard.views.estimate_panel import fit_buttons, fit_panel
from dashboard.views.launch_panel import launch_panel
from dashboard.views.live_panel import TAKEN_OVER, live_panel, start_if_pressed
from dashboard.views.run_details import details
from stepscope.run import RunError, RunKind, read_run
from trainer.config import checkpoints
from trainer.strategy_validation import start_problem

server = services.get()
if not server.devices_known:
    with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
        server.devices()
found = server.devices()

link_problems = controls.load_settings(found)
listing = server.index.fresh()
picked = picked_run(server, listing)
run, trouble = None, None
try:
    run = read_run(server.folder(picked)) if picked else None
    later = next_attempt(run) if run is not None else None
    if later is not None:
        picked, run = later, read_run(server.folder(later))
except RunError as error:
    trouble = str(error)
if run is not None and run.folder.parent == server.examples:
    listing = replace(listing, runs=(*listing.runs, run))

other = run is not None and run_kind(run) is not RunKind.TRAINER
config, problems = controls.sidebar(
    found, checkpoints(server.runs), run_name(run) if run is not None and other else None
)
by_hand = start_problem(config)
to_start = problems if by_hand is None else (*problems, by_hand)
start_if_pressed(server, config, to_start)
with st.session_state.pop(controls.BELOW):
    fit_buttons(server, config, problems)
for problem in link_problems:
    st.warning(f"The link could not be followed in full: {problem}", icon=":material/link_off:")
params = controls.link_params(config, found.devices)
if picked:
    params["run"] = picked
if params != st.query_params.to_dict():
    st.query_params.from_dict(params)

taken_over = st.session_state.pop(TAKEN_OVER, None)
if taken_over is not None:
    st.success(
        f"The sidebar has the settings of the lab now: {escape_markdown(taken_over)}. "
        "Press **Start** to train with them.",
        icon=":material/tune:",
    )
note = run.run_json.get("note") if run else None
if note:
    st.caption(f":material/inventory_2: {escape_markdown(str(note))}")
start = start_button(
    server.active_id(), to_start, server.sweeps.active_id(), server.lesson_refusal()
)
fit_panel(server, config)
if not problems:
    launch_panel(server, config)
if run is not None:
    attempts(run)
live_panel(server, config, start, listing, run, trouble)
if run is None:
    empty_page(server, found, start["refused"])
else:
    details(server, run)
