"""The memory page: where the memory of a run goes, and why it ran out."""

from dataclasses import replace

import streamlit as st

from dashboard import services
from dashboard.api.page_token import page_token
from dashboard.controls.run_picker import choices, choose, picked_run
from dashboard.controls.sidebar import keep_settings
from dashboard.views.memory_breakdown import empty_memory, ledger_section, wait_for_run
from dashboard.views.memory_oom import oom_section
from dashboard.views.memory_snapshots import snapshot_section
from stepscope.run import RunError, read_run

PICKER = "memory_run"

server = services.get()
keep_settings()
listing = server.index.fresh()
picked = picked_run(server, listing)
run, trouble = None, None
try:
    run = read_run(server.folder(picked)) if picked else None
except RunError as error:
    trouble = str(error)
if run is not None and run.folder.parent == server.examples:
    listing = replace(listing, runs=(*listing.runs, run))
if picked and st.query_params.get("run") != picked:
    st.query_params["run"] = picked
elif not picked:
    st.query_params.pop("run", None)

labels = dict(choices(picked, listing))
if labels:
    st.session_state[PICKER] = picked  # another tab, or the Live page, may have chosen since
    st.selectbox(
        "Run",
        list(labels),
        format_func=labels.__getitem__,
        index=None,
        placeholder="Choose a run",
        label_visibility="collapsed",
        key=PICKER,
        on_change=lambda: choose(st.session_state[PICKER]),
        width=520,
    )
token = page_token(listing, run, server.measuring())
if run is None:
    wait_for_run(token)
    empty_memory(server, trouble)
else:
    oom_section(run)
    ledger_section(run, token)
snapshot_section(run)
