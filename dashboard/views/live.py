"""The live page: choose settings, start a run, watch it and act on it."""

import streamlit as st

from dashboard import controls, services
from dashboard.command_bar import show_error
from dashboard.live_panel import live_panel
from dashboard.panels import details, empty_page, run_picker
from stepscope.run import RunError, read_run
from trainer.config import checkpoints

server = services.get()
if not server.devices_known:
    with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
        server.devices()
found = server.devices()

link_problems = controls.load_link(found)
config, wrong = controls.sidebar(found, checkpoints(server.runs))
for problem in link_problems:
    st.warning(f"The link could not be followed in full: {problem}", icon=":material/link_off:")

picked = run_picker(server)
params = controls.link_params(config, found.devices)
if picked:
    params["run"] = picked
if params != st.query_params.to_dict():
    st.query_params.from_dict(params)

run = None
try:
    run = read_run(server.folder(picked)) if picked else None
except RunError as error:
    show_error(str(error))

live_panel(server, config, wrong, run.folder if run else None)
if run is None:
    empty_page(server, found)
else:
    details(server, run)
