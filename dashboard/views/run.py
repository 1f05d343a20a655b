"""The Run page: settings of a new run, and one run with its controls and tabs."""

from dataclasses import replace

import streamlit as st

from dashboard import services
from dashboard.charts.run_view import run_kind, run_name
from dashboard.controls import sidebar as controls
from dashboard.controls.actions import start_refusal
from dashboard.controls.run_picker import picked_run
from dashboard.format import escape_markdown, note
from dashboard.services import ServerActivity
from dashboard.views import live_panel as live
from dashboard.views.memory_probe import estimate_buttons, estimate_panel
from dashboard.views.parts import devices, simulated_badge, start_button
from dashboard.views.run_memory import memory_tab
from dashboard.views.run_tabs import code_lines, details_tab, logs_tab, profile_section, ranks_tab
from stepscope.run import RunError, RunKind, read_metadata, read_run
from trainer.config import checkpoints

server = services.get()
found = devices(server)
link_problems = controls.load_settings(found)
listing = server.run_list.fresh()
picked = picked_run(server, listing)
run = None
trouble = None
try:
    run = read_run(server.folder(picked)) if picked else None
except RunError as error:
    trouble = str(error)
if run is not None and run.folder.parent == server.examples:
    listing = replace(listing, runs=(*listing.runs, run))
tab = live.open_tab(run)

about = None
if run is not None and run_kind(run) is not RunKind.TRAINER:
    shown = escape_markdown(run_name(run))
    about = f"These settings start a built-in workload. The shown run is {shown}."
form = controls.sidebar(found, "New run", about, checkpoints(server.runs))
config = form.config
problems = form.problems
refused = start_refusal(server.busy_reason(ServerActivity.RUN), problems)
if not problems:
    with form.estimate:
        estimate_buttons(server, config)
kind = "secondary" if run is not None and run.status.live else "primary"
text = "Train with these settings."
if start_button(
    "Start run", refused, text, form.start, type=kind, width="stretch", key="start_run"
):
    st.session_state[live.START] = True
live.start_if_requested(server, config, problems)

for problem in link_problems:
    st.warning(f"Part of the link was ignored: {problem}", icon=":material/link_off:")
params = controls.link_params(config, found.devices)
if picked:
    params["run"] = picked
chosen_tab = tab if run is not None else st.session_state[live.TAB]  # for the next run
if chosen_tab in live.TABS and chosen_tab != "overview":
    params["tab"] = chosen_tab
if params != st.query_params.to_dict():
    st.query_params.from_dict(params)

applied = st.session_state.pop(live.APPLIED, None)
if applied is not None:
    st.success(
        f"{escape_markdown(applied)} Press **Start run** to train with them.",
        icon=":material/tune:",
    )
if run is not None and (noted := read_metadata(run).note):
    note("inventory_2", escape_markdown(noted))
estimate_panel(server, config)
simulated_badge(server, run)
live.live_panel(server, config, listing, run, tab, trouble)
if run is None:
    live.welcome(server, found, refused)
elif tab == "overview":
    code_lines(run)
elif tab == "memory":
    memory_tab(run)
elif tab == "ranks":
    ranks_tab(run)
elif tab == "profile":
    profile_section(run)
elif tab == "logs":
    logs_tab(run)
elif tab == "details":
    details_tab(run)
