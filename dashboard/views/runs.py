"""The runs page: one row a run, sortable and searchable; choosing a row opens the run in Live."""

import streamlit as st

from dashboard import services
from dashboard.api.page_token import page_token
from dashboard.controls.run_picker import RUN
from dashboard.live_chart import runs_watch
from dashboard.views.panels import examples
from dashboard.views.run_rows import row

LIVE_AGAIN = "5s"  # how often rows of live runs are read again; there is no timer without one
number, text = st.column_config.NumberColumn, st.column_config.TextColumn
COLUMNS = {
    "Name": text(pinned=True, help="The script, or the built-in workload."),
    "Status": text(help="Stopped: by the user. Failed: by an error. Crashed: without a word."),
    "Kind": text(help="Built-in training, watched script, script with stepscope.init, recording."),
    "Device": text(help="The device that the run trains on."),
    "Precision": text(help="Of built-in trainings; a script decides for itself."),
    "Steps": number(format="localized", help="Optimizer steps recorded."),
    "Best loss": number(
        format="%.4g", help="Lowest validation loss; training loss where nothing is validated."
    ),
    "Samples/s": number(format="%,.0f", help="Mean of all steps' samples divided by their time."),
    "Peak allocated": number(
        format="%.2f GiB", help="Highest value of torch's CUDA allocator; none on a CPU."
    ),
    "Peak process": number(
        format="%.2f GiB", help="Highest resident memory of the training process."
    ),
    "Started": st.column_config.DatetimeColumn(format="D MMM HH:mm", help="Local time."),
    "Duration": number(format="compact", help="Hours:minutes:seconds from start to end."),
}

server = services.get()
listing = server.index.fresh()


def table() -> None:
    """Draw the rows; one that is chosen opens in Live."""
    runs = server.list_runs()
    with st.spinner("Reading the runs…", show_time=True):
        rows = [row(run, server.summary(run)) for run in runs]
    chosen = st.dataframe(
        rows,
        column_config=COLUMNS,
        hide_index=True,
        placeholder="–",
        on_select="rerun",
        selection_mode="single-row",
        key="runs_table",
        alt="All runs, newest first",
    )["selection"]["rows"]
    if chosen:
        run_id = runs[chosen[0]].id
        st.session_state[RUN] = run_id
        st.switch_page("views/live.py", query_params={"run": run_id})


if listing.runs:
    live = any(run.status.live for run in listing.runs)
    st.fragment(table, run_every=LIVE_AGAIN if live else None)()
    st.caption("Select a row to open the run. A click on a column's title sorts by it.")
else:
    st.markdown("#### No runs yet\nStart one on the Live page, or watch a script of your own.")
examples(server)
if runs_watch(page_token(listing, None), key="runs_page").stale:
    st.rerun()
