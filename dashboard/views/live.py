"""The live page: choose settings, start a run, watch it and act on it."""

import streamlit as st

from dashboard import controls, services
from dashboard.charts import layout
from dashboard.command_bar import command_bar
from dashboard.facts import run_facts
from dashboard.live_chart import live_chart
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
    st.error(str(error), icon=":material/error:")

pending = command_bar(server, config, wrong, run)
if run is None:
    empty_page(server, found)
else:
    live_chart(
        run.id, layout(run_facts(run)), key="live", status=run.status, pending_command=pending
    )
    details(server, run)
