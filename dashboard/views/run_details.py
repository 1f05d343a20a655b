"""Below the charts: what a run printed, the files in its folder, its settings and environment."""

from __future__ import annotations

import functools
import os
import shlex
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.charts.run_view import run_kind
from dashboard.controls import sidebar as controls
from dashboard.controls.run_labels import KINDS
from dashboard.format import escape_markdown
from dashboard.run_files import Snapshot, snapshot_bytes, snapshots, tail, too_large_to_download
from dashboard.services import Services
from dashboard.views.live_panel import ERROR
from dashboard.views.run_profile import profile_section
from dashboard.views.run_ranks import ranks_section
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import RunInfo, RunKind, rank_file
from trainer.config import ConfigError, RunConfig

OUTPUT = "output.log"
OUTPUT_HEIGHT = 320  # px
OUTPUT_LINES = 12
"""Lines that fit into that height."""
CHECKPOINTS = 50
"""Checkpoints listed at most."""
_HIDDEN = {"capabilities", "fit"}


def details(server: Services, run: RunInfo) -> None:
    """Draw the traceback, the output and the files of a run, then its settings."""
    trainer = run_kind(run) is RunKind.TRAINER
    whose = f" of rank {run.cause_rank}" if run.cause_rank else ""
    _text_file(run, rank_file("traceback.txt", run.cause), f"Traceback{whose}", expanded=True)
    _text_file(run, "worker.log", "Output of the training process")
    if run.cause:
        _text_file(run, rank_file("worker.log", run.cause), f"Output of rank {run.cause_rank}")
    if not trainer:
        _script(run)
    if os.path.exists(run.folder / OUTPUT):
        _output(run.folder)
    ranks_section(run)
    profile_section(run)
    kept = snapshots(run.folder)
    if kept:
        _snapshots(run, kept)
    checkpoints = sorted(run.folder.glob("*.pt")) if trainer else []
    if checkpoints and not run.status.live:
        _checkpoints(server, run, [path.name for path in checkpoints[:CHECKPOINTS]])
    with st.expander("Settings and environment of this run", icon=":material/info:"):
        st.json({name: value for name, value in run.run_json.items() if name not in _HIDDEN})


def _script(run: RunInfo) -> None:
    """Draw which script ran, where, and which of its ranks is shown."""
    lines = []
    script = run.run_json.get("script")
    if isinstance(script, dict):
        given = script.get("arguments")
        words = [str(script.get("path")), *map(str, given if isinstance(given, list) else [])]
        lines.append(("Script", shlex.join(words)))
        lines.append(("Working directory", str(script.get("cwd"))))
    size = run.run_json.get("world_size")
    if lines:
        with st.expander(f"Script ({KINDS[run_kind(run)]})", icon=":material/description:"):
            for title, text in lines:
                st.caption(title)
                st.code(text, language=None, wrap_lines=True)
    if isinstance(size, int) and size > 1:
        st.caption(
            f":material/lan: Rank 0 of {size} is shown in the charts; the section Ranks compares "
            "all of them."
        )


@st.fragment
def _output(folder: Path) -> None:
    """Draw the end of what the script printed, as of now; read only while unfolded."""
    box = st.expander(
        "Output of the script", icon=":material/terminal:", key="output", on_change="rerun"
    )
    if not box.open:
        return
    with box:
        text = tail(folder / OUTPUT)
        st.button(
            "Refresh",
            icon=":material/refresh:",
            key="refresh_output",
            type="tertiary",
            help="Read the last 20 kB again.",
        )
        if text is None:
            st.caption("The output cannot be read.")
        elif not text.strip():
            st.caption("The script has printed nothing yet.")
        else:
            long = text.count("\n") > OUTPUT_LINES
            # The box, not the text in it, has the height: only a box can begin at its end.
            with st.container(
                height=OUTPUT_HEIGHT if long else "content", border=False, autoscroll=True
            ):
                st.code(text, language=None, wrap_lines=True)


def _snapshots(run: RunInfo, kept: tuple[Snapshot, ...]) -> None:
    with st.container(horizontal=True, key="snapshots"):
        for snapshot in kept:
            refused = too_large_to_download(run.folder / snapshot.name, snapshot.size)
            if refused is not None:
                st.caption(escape_markdown(printable(refused)))
                continue
            st.download_button(
                f"{snapshot.name} ({format_bytes(snapshot.size)})",
                functools.partial(snapshot_bytes, run.folder, snapshot.name),
                file_name=f"{run.id}-{snapshot.name}",
                icon=":material/download:",
                key=f"snapshot_{snapshot.name}",
                on_click="ignore",
                help="Memory snapshot: open it on pytorch.org/memory_viz. It is a pickle file: "
                "load it with Python only if you trust who wrote it.",
            )


def _checkpoints(server: Services, run: RunInfo, names: list[str]) -> None:
    with st.container(horizontal=True, key="checkpoints"):
        for name in names:
            st.download_button(
                f"Weights of {name}",
                functools.partial(server.weights, run.id, name),
                file_name=f"{run.id}-{name.removesuffix('.pt')}-weights.pt",
                icon=":material/download:",
                key=f"weights_{name}",
                on_click="ignore",
                help="The state_dict alone; load it with torch.load(..., weights_only=True).",
            )
        st.button(
            "Resume in a new run",
            icon=":material/resume:",
            key="resume_run",
            on_click=_resume,
            args=(run, names),
            help="Put this run's settings and its last checkpoint into the sidebar.",
        )


def _resume(run: RunInfo, names: list[str]) -> None:
    last = "last.pt" if "last.pt" in names else names[-1]
    try:
        config = RunConfig.from_dict({**run.run_json["config"], "resume": f"{run.id}/{last}"})
    except (ConfigError, KeyError, TypeError) as error:
        st.session_state[ERROR] = f"This run's settings cannot be used: {error}"
        return
    controls.load(config)


def _text_file(run: RunInfo, name: str, title: str, **options: Any) -> None:
    text = tail(run.folder / name)
    if text and text.strip():
        with st.expander(title, icon=":material/terminal:", **options):
            st.code(text, language=None, wrap_lines=True)
