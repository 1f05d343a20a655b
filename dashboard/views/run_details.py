"""The tabs Logs and Details of a run: output, files, settings and environment."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.charts.run_view import run_kind, world_size_of
from dashboard.controls import sidebar as controls
from dashboard.run_files import tail
from dashboard.services import Services
from dashboard.views.live_panel import APPLIED, ERROR
from dashboard.views.parts import download, output, table
from stepscope.run import RunInfo, RunKind, rank_file
from trainer.config import ConfigError, RunConfig

OUTPUT = "output.log"
CHECKPOINTS = 50  # Checkpoints listed at most.
_HIDDEN = {"capabilities", "fit"}


def logs_tab(run: RunInfo) -> None:
    """Draw the traceback and what the run printed."""
    distributed = world_size_of(run.run_json) > 1
    whose = f" of rank {run.cause_rank}" if distributed else ""
    drawn = [
        _text_file(run, rank_file("traceback.txt", run.cause), f"Traceback{whose}", expanded=True),
        _text_file(run, "worker.log", "Training process output"),
        bool(run.cause)
        and _text_file(run, rank_file("worker.log", run.cause), f"Output of rank {run.cause_rank}"),
    ]
    if os.path.exists(run.folder / OUTPUT):
        _output(run.folder)
    elif not any(drawn):
        st.caption(_no_logs(run))


def _no_logs(run: RunInfo) -> str:
    if run_kind(run) is RunKind.INIT:
        return "The output of a script with stepscope.init is not recorded. See its terminal."
    if run_kind(run) is RunKind.RECORD:
        return "A recording of the hardware has no output."
    return "The run has printed nothing."


def details_tab(server: Services, run: RunInfo) -> None:
    """Draw the command, files, settings and environment of a run."""
    trainer = run_kind(run) is RunKind.TRAINER
    script = run.run_json.get("script")
    if isinstance(script, dict):
        _script(script)
    checkpoints = sorted(run.folder.glob("*.pt")) if trainer else []
    if checkpoints and not run.status.live:
        st.markdown("#### Checkpoints")
        _checkpoints(server, run, [path.name for path in checkpoints[:CHECKPOINTS]])
    config = run.run_json.get("config")
    if isinstance(config, dict) and config:
        _table("Settings", config)
    environment = run.run_json.get("environment")
    if isinstance(environment, dict):
        _table("Environment", environment)
    st.markdown("#### Export")
    st.code(f"stepscope export {run.id} --format csv", language=None, wrap_lines=True)
    with st.expander("All recorded properties (run.json)", icon=":material/data_object:"):
        st.json({name: value for name, value in run.run_json.items() if name not in _HIDDEN})


def _table(title: str, values: Mapping[str, Any]) -> None:
    """Draw names and values as a table; nested values as JSON."""
    rows = [
        {"Name": name, "Value": value if isinstance(value, str) else json.dumps(value)}
        for name, value in values.items()
    ]
    st.markdown(f"#### {title}")
    wide = {"Name": st.column_config.TextColumn(width="medium")}
    table(rows, wide, f"details_{title.lower()}", title, height="content", width="content")


def _script(script: Mapping[str, Any]) -> None:
    """Draw which script ran, and where."""
    given = script.get("arguments")
    words = [str(script.get("path")), *map(str, given if isinstance(given, list) else [])]
    for title, text in (
        ("Script", shlex.join(words)),
        ("Working directory", str(script.get("cwd"))),
    ):
        st.caption(title)
        st.code(text, language=None, wrap_lines=True)


@st.fragment
def _output(folder: Path) -> None:
    """Draw the end of the script's output; read only while expanded."""
    box = st.expander(
        "Script output", icon=":material/terminal:", key="output", on_change="rerun", expanded=True
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
            help="Reload the last 20 kB.",
        )
        if text is None:
            st.caption("The output file cannot be read.")
        elif not text.strip():
            st.caption("No output yet.")
        else:
            output(text)


def _checkpoints(server: Services, run: RunInfo, names: list[str]) -> None:
    with st.container(horizontal=True, key="checkpoints"):
        for name in names:
            download(
                f"Download weights ({name})",
                functools.partial(server.weights, run.id, name),
                f"{run.id}-{name.removesuffix('.pt')}-weights.pt",
                f"weights_{name}",
                "state_dict only; load it with torch.load(..., weights_only=True).",
            )
        st.button(
            "Resume in a new run",
            icon=":material/resume:",
            key="resume_run",
            on_click=_resume,
            args=(run, names),
            help="Put this run's settings and its last checkpoint into the sidebar, then press "
            "Start run.",
        )


def _resume(run: RunInfo, names: list[str]) -> None:
    last = "last.pt" if "last.pt" in names else names[-1]
    try:
        config = RunConfig.from_dict({**run.run_json["config"], "resume_from": f"{run.id}/{last}"})
    except (ConfigError, KeyError, TypeError) as error:
        st.session_state[ERROR] = f"This run's settings cannot be used: {error}"
        return
    controls.load(config)
    st.session_state[APPLIED] = (
        f"The sidebar has the settings of this run and continues from {config.resume_from} (Resume "
        "from in the Training group)."
    )


def _text_file(run: RunInfo, name: str, title: str, **options: Any) -> bool:
    """Draw the end of a text file; return False for a missing or empty one."""
    text = tail(run.folder / name)
    if not text or not text.strip():
        return False
    with st.expander(title, icon=":material/terminal:", **options):
        st.code(text, language=None, wrap_lines=True)
    return True
