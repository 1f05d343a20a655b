"""The ranks of a distributed run: why it hangs or waits, and a table."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboard import services
from dashboard.format import code_between_backticks, escape_markdown
from dashboard.ranks.job_ranks import read_job
from dashboard.views import parts
from stepscope.run import RunError, RunInfo, read_run

PERCENT = "%.0f%%"
GIB = "%.2f GiB"
MS = "%.1f ms"
COLUMNS = {
    "Rank": parts.number(pinned=True, help="Global rank of the process."),
    "Status": parts.text(help="Alive: the process is still recording."),
    "Reason": parts.text(width="large"),
    "Last step": parts.number(format="localized", help="Latest recorded step."),
    "Step time": parts.number(
        format=MS, help="Mean of the last 128 steps, waiting for other ranks included."
    ),
    "Lateness": parts.number(
        format=MS,
        help="Time that the rank is busy in a step, less that of the median rank. The others wait "
        "for the rank with the highest value.",
    ),
    "Wait for ranks": parts.number(
        format=PERCENT,
        help="Share of the step that backward waits for other ranks. The slowest waits least.",
    ),
    "Data wait": parts.number(
        format=PERCENT, help="Share of the step spent waiting for the next batch."
    ),
    "Memory": parts.number(format=GIB, help="Allocated on the GPU; on a CPU that of the process."),
    "Peak memory": parts.number(format=GIB, help="Since the start or the last reset."),
    "Utilization": st.column_config.ProgressColumn(
        min_value=0, max_value=100, format=PERCENT, help="Of the GPU, by all processes."
    ),
}


OUTLIVE_S = 600.0  # The other ranks of a job may end this long after rank 0, by a timeout.


def rank_overview(run: RunInfo) -> None:
    """Draw the ranks of a job: again every 2 s while a rank may be live.

    The ranks train in processes of their own, so that drawing costs no step of theirs.
    """
    may_change = run.status.live or run.heartbeat_age_s < OUTLIVE_S
    st.fragment(_ranks, run_every="2s" if may_change else None)(run.folder)


def _ranks(folder: Path) -> None:
    server = services.get()
    try:
        run = read_run(folder)
    except RunError as error:
        parts.warning(str(error))
        return
    job = server.ranks.of(run) or read_job(run)
    findings = server.findings.of(run)
    found = None if findings is None else findings.job
    named = set() if found is None else set(found["ranks"])
    if found is not None:
        words = code_between_backticks(found["words"] or "")
        text = f"**{escape_markdown(found['text'])}** {words}"
        if named:
            st.warning(text, icon=":material/running_with_errors:")
        else:
            st.caption(text)
    # Named ranks first: a table of many ranks shows only the first ones without scrolling.
    rows = sorted(job.rows, key=lambda row: row["Rank"] not in named)
    parts.table(rows, COLUMNS, "ranks", "Ranks of the job")
    if job.left_out:
        st.caption(f"{job.left_out:,} more ranks are not shown.")
