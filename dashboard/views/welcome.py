"""The Run page without a run: how to watch a script, and the recorded examples."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import streamlit as st

from dashboard.controls.run_picker import choose
from dashboard.format import button, code_between_backticks, escape_markdown
from dashboard.services import Devices, Services
from dashboard.views.live_panel import TAB
from dashboard.views.memory_snapshots import snapshot_section
from dashboard.views.parts import connections, practice_command
from stepscope.common.formatting import format_bytes


def welcome(server: Services, found: Devices, refused: str | None) -> None:
    """Draw the actions without a run; `refused` is why Start run is disabled, or None."""
    best = found.devices[0]
    st.markdown("#### No run is shown")
    connections(server)
    if refused is None:
        memory = format_bytes(best.memory_total)
        name = escape_markdown(best.name)
        st.markdown(f"**Start run** in the sidebar trains on {name} ({memory}).")
    else:
        why = code_between_backticks(refused)
        st.warning(f"**Start run** is disabled. {why}", icon=":material/block:")
    practice = practice_command()
    if found.cuda_reason is not None and practice is not None:
        st.markdown(
            f"**No GPU here?** `{practice}` opens this page with simulated GPUs. Their memory "
            "accounting is that of PyTorch's CUDA build; their times are not those of a GPU."
        )
    left, right = st.columns(2)
    with left, st.container(border=True, height="stretch", key="welcome_watch"):
        st.markdown("##### Watch my script")
        st.markdown("Run your training script in a terminal. The script stays unchanged.")
        st.code(watch_command(server.runs), language=None, wrap_lines=True)
        st.caption(f"The run appears here, and its files in `{server.runs.absolute()}`.")
    with right, st.container(border=True, height="stretch", key="welcome_demo"):
        st.markdown("##### Try a demo")
        examples(server)
    box = st.expander(
        "Open a memory snapshot",
        icon=":material/memory_alt:",
        key="welcome_snapshot",
        on_change="rerun",
        expanded=st.session_state.get(TAB) == "memory",
    )
    if box.open:
        with box:
            snapshot_section(None)


def watch_command(runs: Path) -> str:
    """Return a shell command that records a script into `runs`, from any folder."""
    installed = Path(sys.executable).with_name("stepscope")
    on_path = shutil.which("stepscope") is not None or not installed.exists()
    command = "stepscope" if on_path else str(installed)
    folder = shlex.quote(str(runs.absolute()))
    return f"STEPSCOPE_RUNS={folder} {shlex.quote(command)} watch train.py"


def examples(server: Services) -> None:
    """Draw a button for each recorded example."""
    for run in server.list_examples():
        with st.container(key=f"example_{run.id}"):
            name = str(run.run_json["name"])
            opened = button(name, "play_circle", f"open_{run.id}", "Open this recording.")
            st.caption(str(run.run_json["note"]))
        if opened:
            open_run(run.id)


def open_run(run_id: str) -> None:
    """Show this run on the Run page."""
    choose(run_id)
    st.switch_page("views/run.py", query_params={"run": run_id})
