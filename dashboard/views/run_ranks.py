"""The Ranks tab below its charts: output, properties and export of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.charts.run_view import run_kind
from dashboard.ranks.members import read_member
from dashboard.run_files import tail
from dashboard.views.parts import output
from stepscope.run import RunInfo, RunKind, rank_file, rank_json
from stepscope.run.rank_info import rank_numbers

LISTED = 256  # Ranks that can be picked at most.
LOGS = ("output.log", "worker.log", "traceback.txt")
HIDDEN = {"capabilities", "fit", "gpu_processes"}
JSON_LIMIT = 1_000_000  # Bytes of a rank's file that are shown: others may have written it.


def ranks_tab(run: RunInfo) -> None:
    """Draw the output and the properties of one rank, which the user picks."""
    with st.expander("Output and settings of a rank", icon=":material/lan:", expanded=True):
        numbers = {
            rank_label(run.folder, number): number for number in rank_numbers(run.folder)[:LISTED]
        }
        label = st.selectbox(
            "Rank", list(numbers), key="rank_details", help="Global rank of the process."
        )
        _rank(run, numbers.get(label, 0))


def rank_label(folder: Path, number: int) -> str:
    """Return what a rank is called in the list, "Rank 3 · node01": it stays while it runs."""
    member = read_member(folder, number)
    return f"Rank {number}" if member is None else f"Rank {member.rank} · {member.host}"


def _rank(run: RunInfo, number: int) -> None:
    shown = False
    for name in LOGS:
        text = tail(run.folder / rank_file(name, number))
        if text is not None and text.strip():
            shown = True
            st.caption(rank_file(name, number))
            output(text)
    if not shown:
        st.caption(_no_output(run))
    st.caption("Export the metrics of this rank:")
    command = f"stepscope export {run.id} --format csv --rank {number}"
    st.code(command, language=None, wrap_lines=True)
    st.caption("Settings and environment")
    st.json(_settings(run.folder / rank_json(number)), expanded=1)


def _no_output(run: RunInfo) -> str:
    if run_kind(run) is RunKind.INIT:
        return "The output of a script with stepscope.init is not recorded. See its terminal."
    return "The rank has printed nothing."


def _settings(path: Path) -> dict[str, Any]:
    text = tail(path, JSON_LIMIT)
    try:
        told = json.loads(text or "")
    except ValueError:
        return {"problem": "The rank's file cannot be read."}
    if not isinstance(told, dict):
        return {"problem": "The rank's file has an unknown format."}
    return {name: value for name, value in told.items() if name not in HIDDEN}
