"""The Runs page: one row per run, sortable and searchable; a click on a cell opens the run."""

import streamlit as st

from dashboard import services
from dashboard.controls.sidebar import keep_settings
from dashboard.format import escape_markdown
from dashboard.views import parts
from dashboard.views.parts import number, text
from dashboard.views.run_rows import disk_use, row
from dashboard.views.welcome import examples, open_run

COLUMNS = {
    "Name": text(pinned=True, help="The script, or the built-in workload."),
    "Status": text(help="Stopped by the user, failed with an error, or crashed without a message."),
    "Kind": text(help="Built-in training, watched script, script with stepscope.init, recording."),
    "Ranks": text(help="Number of ranks and how they share the work."),
    "Device": text(help="Training device."),
    "Precision": text(help="Built-in runs only."),
    "Steps": number(format="localized", help="Optimizer steps recorded."),
    "Best loss": number(
        format="%.4g", help="Lowest validation loss; training loss where nothing is validated."
    ),
    "Samples/s": number(
        format="%,.0f",
        help="Samples per step divided by mean step time. Distributed runs: rank 0's rate times "
        "the number of ranks.",
    ),
    "Peak allocated": number(
        format="%.2f GiB", help="Peak of torch's CUDA allocator; empty for CPU runs."
    ),
    "Peak process": number(format="%.2f GiB", help="Peak resident memory of the training process."),
    "Size": number(
        format="%.1f MiB", help="All files of the run folder; a live run has a buffer of 16 MiB."
    ),
    "Started": st.column_config.DatetimeColumn(format="D MMM HH:mm", help="Local time."),
    "Duration": number(format="compact", help="Hours:minutes:seconds from start to end."),
}

server = services.get()
keep_settings()


@st.fragment(run_every="5s")
def table() -> None:
    """Draw a row for each run; a click on a cell opens the run."""
    runs = server.list_runs()
    if not runs:
        st.markdown(f"#### No runs yet\nRuns recorded in `{server.runs.absolute()}` appear here.")
        return
    with st.spinner("Reading the runs…", show_time=True):
        summaries = [server.summary(run) for run in runs]
    rows = [row(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    alt = "All runs, live ones first, then the newest"
    select = {"on_select": "rerun", "selection_mode": ["single-row", "single-cell"]}
    chosen = parts.table(rows, COLUMNS, "runs_table", alt, height="auto", **select)["selection"]
    if chosen["cells"]:
        open_run(runs[chosen["cells"][0][0]].id)
    with st.container(horizontal=True, vertical_alignment="center"):
        for index in chosen["rows"][:1]:
            name = escape_markdown(str(rows[index]["Name"]))
            if st.button(f"Open {name}", icon=":material/open_in_full:", key="open_ticked"):
                open_run(runs[index].id)
        st.caption("Click a cell to open the run. Click a column title to sort.")
        st.caption(disk_use(server.runs, [summary.size or 0 for summary in summaries]))


table()
examples(server)
