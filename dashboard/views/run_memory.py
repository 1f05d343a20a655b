"""The Memory tab of a run: out of memory, breakdown, other processes, snapshots."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.charts.memory_breakdown import (
    breakdown_figure,
    breakdown_of,
    breakdown_rows,
    missing_reasons,
)
from dashboard.charts.run_view import run_content
from dashboard.format import escape_markdown
from dashboard.out_of_memory import shortage
from dashboard.views.memory_snapshots import snapshot_section
from dashboard.views.parts import number, plot, table, text, warning
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.oom.classify import OomAnalysis
from stepscope.run import RunError, RunInfo, read_run
from stepscope.store import StoreError

MAX_PROCESSES = 200
MAX_TEXT_LENGTH = 200
STATES = {"zombie": "zombie (ended, not reaped by its parent)", "gone": "ended"}
PROCESS_COLUMNS = {
    "Name": text(pinned=True, help="Process name, as ps shows it; – if unknown."),
    "Memory": number(format="%.1f MiB", help="On this GPU, as reported by the driver."),
    "PID": number(format="%d", help="Process ID."),
    "User": text(help="Owner of the process."),
    "Command": text(width="large", help="Full command line."),
    "State": text(help="Empty for a running process."),
}


def memory_tab(run: RunInfo) -> None:
    """Draw the out-of-memory analysis, the memory breakdown and snapshots."""
    gpu = run_content(run).training_gpu
    oom_section(run)
    st.markdown("#### Memory breakdown")
    st.caption(_scope(run, gpu))
    live = run.status.live and st.toggle(
        "Live", True, key="breakdown_live", help="Draw it again every 5 s, without a zoom."
    )
    st.fragment(_breakdown, run_every="5s" if live else None)(run)
    if gpu is not None:
        _processes(run, gpu)
    snapshot_section(run)


# Reading and drawing the H100 example takes 17 ms of CPU, so a thread run loses little every 5 s.
def _breakdown(run: RunInfo) -> None:
    """Draw the categories of memory over time, and as a table with their peaks."""
    try:
        found = breakdown_of(run)
    except StoreError as error:
        st.caption(escape_markdown(f"The samples cannot be read: {error}"))
        return
    if found is None or not found.now:
        st.caption("No readings yet.")
        return
    plot(breakdown_figure(found, run.created), "breakdown", "Memory by category over time")
    rows = [
        row | {name: format_bytes(row[name]) for name in ("Now", "Peak")}
        for row in breakdown_rows(found)
    ]
    about = "Highest value of the category during the run, each at its own time."
    columns = {
        "Category": text(pinned=True),
        "Now": text(alignment="right"),
        "Share": number(format="%.1f%%", help="Of the total."),
        "Peak": text(alignment="right", help=about),
        "Meaning": text(width="large"),
    }
    table(rows, columns, "categories", "Memory by category", height="content")
    for note in found.notes:
        st.caption(escape_markdown(note))


def process_rows(run_json: dict[str, Any], gpu: str) -> list[dict[str, Any]] | None:
    """Return the valid entries of other processes on the GPU, largest first; None if unknown."""
    entries = (run_json.get("gpu_processes") or {}).get(gpu)
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
        alt = "Other processes on the GPU, those with most memory first"
        table(rows, PROCESS_COLUMNS, "memory_processes", alt)
    if rows and not run.status.live:
        st.caption("State at the end of the run.")


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    memory = entry.get("memory")
    pid = entry.get("pid")
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
    if uuid is None:
        return (
            "Memory of the host, or of its container if the container has a limit: this run trains "
            "on the CPU."
        )
    names = {gpu.uuid: f"{gpu.name} ({uuid})" for gpu in run_content(run).gpus}
    rank_note = " Values of rank 0." if run.world_size > 1 else ""
    return f"Memory of {escape_markdown(names.get(uuid, uuid))}.{rank_note}"


def oom_section(run: RunInfo) -> None:
    """Draw why memory ran out and what to do; nothing if no allocation failed."""
    try:
        found = shortage(run, services.get().devices().devices)
    except (OSError, ValueError) as error:
        warning(f"The out-of-memory record cannot be read: {error}")
        return
    if found is None:
        return
    finding = found.finding
    record = found.report.last
    ended = "Out of memory" if found.report.ended else "Allocation failed, script continued"
    with st.container(border=True, key="oom"):
        st.markdown(f"#### {ended}: {escape_markdown(finding.cause.value)}")
        st.markdown(escape_markdown(finding.text))
        st.caption(escape_markdown(_when(found)))
        left, right = st.columns([2, 3], gap="large")
        with left:
            st.markdown(evidence_table(finding.evidence))
        with right:
            st.markdown("##### What to try, best first")
            for position, step in enumerate(finding.recommendations, start=1):
                st.markdown(f"{position}. {escape_markdown(step.text)}")
                if step.code is not None:
                    st.code(step.code, language="python" if "\n" in step.code else None)
        if record.stack:
            with st.expander("Allocating stack, innermost frame first"):
                st.code("\n".join(record.stack), language=None)


def _when(found: OomAnalysis) -> str:
    last = found.report.last
    seen = found.report.seen
    try:
        clock = f"{datetime.datetime.fromtimestamp(last.ts):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        clock = "unknown time"
    parts = [f"After step {last.step:,}", f"at {clock}"]
    if last.phase is not None:
        parts.append(f"during {last.phase}")
    if seen > 1:
        parts.append(f"last of {seen:,} failed allocations")
    if last.incomplete is not None:
        parts.append(f"missing: {last.incomplete}")
    return f"{', '.join(parts)}."


def evidence_table(evidence: Mapping[str, str]) -> str:
    """Return the figures as a Markdown table, the values aligned on the right."""
    rows = [f"| {_cell(name)} | {_cell(shown)} |" for name, shown in evidence.items()]
    return "\n".join(["| Evidence | Value |", "|:--|--:|", *rows])


def _cell(text: str) -> str:
    return escape_markdown(" ".join(text.split()))
