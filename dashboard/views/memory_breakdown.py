"""The section of the memory page that says where the memory goes, and the page without a run."""

from __future__ import annotations

import shlex
from typing import Any

import streamlit as st

from dashboard.charts.memory_breakdown import gpu_of, ledger_layout, missing_reasons
from dashboard.charts.run_view import RunContent, run_content
from dashboard.format import escape_markdown
from dashboard.live_chart import memory_ledger
from dashboard.services import Services
from dashboard.views.empty_state import examples
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import RunError, RunInfo, read_run

KEY = "memory_ledger"
AGAIN = "2s"
PROCESSES = 200
"""Processes of a GPU that are listed, at most."""
TEXT_LENGTH = 200
STATES = {"running": "", "zombie": "zombie: ended, its parent has not noticed", "gone": "ended"}
text, number = st.column_config.TextColumn, st.column_config.NumberColumn
COLUMNS = {
    "Name": text(pinned=True, help="The program's name; — where the system does not tell."),
    "Memory": number(format="%.1f MiB", help="On this GPU, as the driver counts it."),
    "PID": number(format="%d", help="The number of the process."),
    "User": text(help="Who runs it."),
    "Command": text(width="large", help="The command line it was started with."),
    "State": text(help="Empty while it runs."),
}


def ledger_section(run: RunInfo, token: str) -> None:
    """Draw the stack and the table of a run's memory, and the other processes on its GPU."""
    content = run_content(run)
    st.markdown("#### Where the memory goes")
    st.caption(_whose(run, content))
    memory_ledger(run.id, ledger_layout(run), key=KEY, page_token=token)
    if gpu_of(content) is not None:
        _processes(run)


def wait_for_run(token: str) -> None:
    """Mount the component without a run: the page runs again when one begins."""
    memory_ledger(None, None, key=KEY, page_token=token)


def empty_memory(server: Services, trouble: str | None) -> None:
    """Say what to do where no run is shown; `trouble` is why the chosen one is not there."""
    if trouble is not None:
        st.warning(escape_markdown(trouble), icon=":material/error:")
    with st.container(border=True, key="empty_memory"):
        st.markdown(
            "#### No run is shown\n"
            "This page says where the memory of a run goes: parameters, gradients, optimizer "
            "state, activations, cache, other processes. Choose a run above, or start one; its "
            "parts appear here while it runs."
        )
        st.page_link(
            "views/live.py", label="Start a training in Live", icon=":material/play_arrow:"
        )
        st.markdown("Or watch a training script of your own, unchanged, from a terminal:")
        folder = server.runs.absolute()
        st.code(
            f"STEPSCOPE_RUNS={shlex.quote(str(folder))} stepscope watch train.py",
            language=None,
            wrap_lines=True,
        )
        examples(server)


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
        return  # the folder was taken away; the page says so
    gpu = gpu_of(run_content(run)) or ""
    rows = process_rows(run.run_json, gpu)
    st.markdown("##### Other processes on this GPU")
    if rows is None:
        reason = missing_reasons(run).get("gpu/mem_others", "this run has not recorded them")
        st.caption(f"Not known: {escape_markdown(reason.rstrip('.'))}.")
    elif not rows:
        st.caption("None: this run has the GPU for itself.")
    else:
        known = [row["Memory"] for row in rows if row["Memory"] is not None]
        if len(known) == len(rows) > 1:
            st.caption(f"{len(rows)} processes, {format_bytes(sum(known) * 2**20)} together.")
        st.dataframe(
            rows,
            column_config=COLUMNS,
            hide_index=True,
            placeholder="–",
            key="memory_processes",
            alt="Other processes on the GPU, those with most memory first",
        )
    if rows and not run.status.live:
        st.caption("As of the run's last seconds.")


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


def _whose(run: RunInfo, content: RunContent) -> str:
    """Return a line on what is divided: which GPU, or the host."""
    uuid = gpu_of(content)
    if uuid is None:
        return (
            "Memory of the host, or of its container where that has a limit: this run trains on "
            "the CPU."
        )
    gpu = next((gpu for gpu in content.gpus if gpu.uuid == uuid), None)
    name = uuid if gpu is None else f"{gpu.name} ({uuid})"
    rank = run.run_json.get("world_size")
    several = isinstance(rank, int) and rank > 1
    return f"Memory of {escape_markdown(name)}." + (" Rank 0 is shown." if several else "")
