"""The Memory tab of a run: out of memory, breakdown, other processes, snapshots."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.charts.memory_breakdown import gpu_of, ledger_layout, missing_reasons
from dashboard.charts.run_view import RunView, run_content
from dashboard.format import escape_markdown
from dashboard.live_chart import memory_ledger
from dashboard.views.memory_oom import oom_section
from dashboard.views.memory_snapshots import snapshot_section
from dashboard.views.parts import table
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import RunError, RunInfo, read_run

KEY = "memory_ledger"
AGAIN = "2s"
PROCESSES = 200  # Processes of a GPU that are listed, at most.
TEXT_LENGTH = 200
STATES = {"running": "", "zombie": "zombie (ended, not reaped by its parent)", "gone": "ended"}
text, number = st.column_config.TextColumn, st.column_config.NumberColumn
COLUMNS = {
    "Name": text(pinned=True, help="Process name, as ps shows it; – if unknown."),
    "Memory": number(format="%.1f MiB", help="On this GPU, as reported by the driver."),
    "PID": number(format="%d", help="Process ID."),
    "User": text(help="Owner of the process."),
    "Command": text(width="large", help="Full command line."),
    "State": text(help="Empty for a running process."),
}


def memory_tab(run: RunInfo, token: str) -> None:
    """Draw why memory ran out, if it did, what the memory is used for, and snapshots."""
    content = run_content(run)
    oom_section(run)
    st.markdown("#### Memory breakdown")
    st.caption(_whose(run, content))
    memory_ledger(run.id, ledger_layout(run), key=KEY, page_token=token)
    if gpu_of(content) is not None:
        _processes(run)
    snapshot_section(run)


def process_rows(run_json: dict[str, Any], gpu: str) -> list[dict[str, Any]] | None:
    """Return a row for each process on the GPU but the run's own, those with most memory first.

    None where the run has no list: the driver hides them, or nobody has asked. What a run.json
    holds in another form than Stepscope writes it is left out.
    """
    listed = run_json.get("gpu_processes")
    entries = listed.get(gpu) if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return None
    own = run_json.get("pid")
    rows = [_row(entry) for entry in entries if isinstance(entry, dict) and entry.get("pid") != own]
    rows.sort(key=lambda row: row["Memory"] or 0.0, reverse=True)
    return rows[:PROCESSES]


@st.fragment(run_every=AGAIN)
def _processes(run: RunInfo) -> None:
    """Draw the other processes on the run's GPU, as its sampler saw them last."""
    try:
        run = read_run(run.folder)
    except RunError:
        return  # the folder was deleted; the header shows it
    gpu = gpu_of(run_content(run)) or ""
    rows = process_rows(run.run_json, gpu)
    st.markdown("#### Other processes on this GPU")
    if rows is None:
        reason = missing_reasons(run).get("gpu/mem_others", "this run has not recorded them")
        st.caption(f"Unknown: {escape_markdown(reason.rstrip('.'))}.")
    elif not rows:
        st.caption("None. This run is the only process on the GPU.")
    else:
        known = [row["Memory"] for row in rows if row["Memory"] is not None]
        if len(known) == len(rows) > 1:
            st.caption(f"{len(rows)} processes, {format_bytes(sum(known) * 2**20)} in total.")
        alt = "Other processes on the GPU, those with most memory first"
        table(rows, COLUMNS, "memory_processes", alt)
    if rows and not run.status.live:
        st.caption("State at the end of the run.")


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    memory, pid = entry.get("memory"), entry.get("pid")
    if not isinstance(memory, int | float) or isinstance(memory, bool) or memory < 0:
        memory = None
    yours = " (you)" if entry.get("yours") is True else ""
    return {
        "Name": _text(entry.get("name")) or "—",
        "Memory": None if memory is None else memory / 2**20,
        "PID": pid if isinstance(pid, int) else None,
        "User": f"{_text(entry.get('user')) or '—'}{yours}",
        "Command": _text(entry.get("command")),
        "State": STATES.get(str(entry.get("state")), ""),
    }


def _text(value: object) -> str:
    return printable(" ".join(value.split()))[:TEXT_LENGTH] if isinstance(value, str) else ""


def _whose(run: RunInfo, content: RunView) -> str:
    """Return a line on what is divided: which GPU, or the host."""
    uuid = gpu_of(content)
    if uuid is None:
        return (
            "Memory of the host, or of its container if the container has a limit: this run trains "
            "on the CPU."
        )
    gpu = next((gpu for gpu in content.gpus if gpu.uuid == uuid), None)
    name = uuid if gpu is None else f"{gpu.name} ({uuid})"
    rank = run.run_json.get("world_size")
    several = isinstance(rank, int) and rank > 1
    return f"Memory of {escape_markdown(name)}." + (" Values of rank 0." if several else "")
