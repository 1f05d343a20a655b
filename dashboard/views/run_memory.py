"""The Memory tab of a run: out of memory, breakdown, other processes, snapshots."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.charts.memory_breakdown import gpu_of, ledger_layout, missing_reasons
from dashboard.charts.run_view import run_content, world_size_of
from dashboard.format import escape_markdown
from dashboard.live_chart import memory_ledger
from dashboard.views.memory_oom import oom_section
from dashboard.views.memory_snapshots import snapshot_section
from dashboard.views.parts import number, table, text
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import RunError, RunInfo, read_run

KEY = "memory_ledger"
MAX_PROCESSES = 200
MAX_TEXT_LENGTH = 200
STATES = {"zombie": "zombie (ended, not reaped by its parent)", "gone": "ended"}
COLUMNS = {
    "Name": text(pinned=True, help="Process name, as ps shows it; – if unknown."),
    "Memory": number(format="%.1f MiB", help="On this GPU, as reported by the driver."),
    "PID": number(format="%d", help="Process ID."),
    "User": text(help="Owner of the process."),
    "Command": text(width="large", help="Full command line."),
    "State": text(help="Empty for a running process."),
}


def memory_tab(run: RunInfo, token: str) -> None:
    """Draw the out-of-memory analysis, the memory breakdown and snapshots."""
    gpu = gpu_of(run_content(run))
    oom_section(run)
    st.markdown("#### Memory breakdown")
    st.caption(_scope(run, gpu))
    memory_ledger(run.id, ledger_layout(run), key=KEY, page_token=token)
    if gpu is not None:
        _processes(run, gpu)
    snapshot_section(run)


def process_rows(run_json: dict[str, Any], gpu: str) -> list[dict[str, Any]] | None:
    """Return a row for each other process on the GPU, the largest first.

    Skips invalid entries. Returns None if the driver hides processes or none was recorded.
    """
    listed = run_json.get("gpu_processes")
    entries = listed.get(gpu) if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return None
    own = run_json.get("pid")
    rows = [_row(entry) for entry in entries if isinstance(entry, dict) and entry.get("pid") != own]
    rows.sort(key=lambda row: row["Memory"] or 0.0, reverse=True)
    return rows[:MAX_PROCESSES]


@st.fragment(run_every="2s")
def _processes(run: RunInfo, gpu: str) -> None:
    """Draw the other processes on the run's GPU, as its sampler read them last."""
    try:
        run = read_run(run.folder)
    except RunError:
        return  # the folder was deleted; the header shows it
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
    return printable(" ".join(value.split()))[:MAX_TEXT_LENGTH] if isinstance(value, str) else ""


def _scope(run: RunInfo, uuid: str | None) -> str:
    """Return which memory the breakdown divides: of a GPU or of the host."""
    if uuid is None:
        return (
            "Memory of the host, or of its container if the container has a limit: this run trains "
            "on the CPU."
        )
    names = {gpu.uuid: f"{gpu.name} ({uuid})" for gpu in run_content(run).gpus}
    several = " Values of rank 0." if world_size_of(run.run_json) > 1 else ""
    return f"Memory of {escape_markdown(names.get(uuid, uuid))}.{several}"
