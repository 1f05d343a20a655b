"""The run's header and charts, one browser component, and what to do without a run."""

from __future__ import annotations

import functools
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.api.routes import page_token
from dashboard.charts.layout import layout
from dashboard.charts.run_view import run_content
from dashboard.controls.actions import buttons
from dashboard.controls.config_widgets import take_proposal
from dashboard.controls.run_picker import RUN, choices, choose
from dashboard.controls.sidebar import load
from dashboard.format import button, code_between_backticks, escape_markdown
from dashboard.live_chart import live_chart
from dashboard.out_of_memory import retry, retry_button
from dashboard.ranks.job_ranks import used_gpus
from dashboard.run_list import Listing
from dashboard.run_rows import with_totals
from dashboard.services import Devices, ServerActivity, Services
from dashboard.views.parts import connections, practice_command, warn_of_unreadable
from stepscope.common.config_issue import ConfigIssue
from stepscope.common.formatting import format_bytes
from stepscope.remote.access import read_only_reason
from stepscope.run import RunError, RunInfo
from trainer.config import RunConfig

# Keys of the session state.
ERROR = "command_error"  # A sentence that the header shows once.
START = "start_requested"  # True until the sidebar's settings are started.
APPLIED = "settings_applied"  # A sentence on new settings of the sidebar, shown once.
TAB = "run_tab"  # The open tab of the run, also `tab` in the URL.
KEY = "live"
TABS = {
    "overview": "Overview",
    "memory": "Memory",
    "ranks": "Ranks",
    "profile": "Profile",
    "logs": "Logs",
    "details": "Details",
}


def open_tab(run: RunInfo | None) -> str:
    """Return the tab to draw: at first the URL's, then the last opened one."""
    tab: str = st.session_state.setdefault(TAB, st.query_params.get("tab", "overview"))
    return tab if tab in tabs_of(run) else "overview"


def tabs_of(run: RunInfo | None) -> dict[str, str]:
    """Return the tabs of a run by name: Ranks only for a distributed run."""
    if run is None:
        return {}
    return {name: TABS[name] for name in TABS if name != "ranks" or run.world_size > 1}


def start_if_requested(
    server: Services, config: RunConfig, problems: Sequence[ConfigIssue]
) -> None:
    """Start the sidebar's settings if START is set, and show that run."""
    state = st.session_state
    if not state.pop(START, False):
        return
    try:
        if problems:
            raise RunError(str(problems[0]))
        state[RUN] = server.start(config).name
        state[TAB] = "overview"
    except (RunError, OSError) as error:
        state[ERROR] = f"The run could not start. {error}"
    else:
        st.rerun()


def live_panel(
    server: Services,
    config: RunConfig,
    listing: Listing,
    run: RunInfo | None,
    tab: str,
    trouble: str | None = None,
) -> None:
    """Draw the header, with why the picked run is unreadable (`trouble`), and charts of `tab`."""
    # Before the layout: if a finding changes between the two, the next poll has another token.
    token = page_token(listing, run, server.busy_reason(ServerActivity.RUN))
    picked = st.session_state.get(RUN)
    retried = None if run is None else retry(run, server.devices().devices)
    error = st.session_state.pop(ERROR, None)
    header = {
        "runs": choices(picked, listing, server.roots),
        "picked": picked,
        "tabs": list(tabs_of(run).items()),
        "tab": tab,
        "retry": retried and retry_button(retried, server.busy_reason(ServerActivity.RUN)),
        "buttons": buttons(run),
        "look_only": read_only_reason(run) if run is not None and run.status.live else None,
        "trouble": trouble,
        "settings": config.to_dict(),
        # Numbered, so that the same sentence is shown again.
        "error": {"id": time.time_ns() // 1000, "text": error} if error else None,
    }
    live_chart(
        run.id if run else None,
        _layout(run) if run else None,
        header,
        key=KEY,
        page_token=token,
        on_tab_change=_open_tab,
        on_run_change=lambda: choose(st.session_state[KEY].run),
        on_setting_change=_apply_setting,
        on_retry_change=functools.partial(_start_retry, retried),
    )


def _layout(run: RunInfo) -> dict[str, Any]:
    """Return the tiles and charts of a run; an ended one has the values of the whole run."""
    content = run_content(run if run.status.live else with_totals(run))
    return layout(replace(content, used_gpus=used_gpus(run)))


def _start_retry(config: RunConfig | ConfigIssue | None) -> None:
    """Make the Run page start these settings, in a callback; does nothing without them."""
    if not isinstance(config, RunConfig):
        return
    load(config)
    st.session_state.setdefault("link_problems", [])  # the URL is not read any more
    st.session_state[START] = True


def _open_tab() -> None:
    if st.session_state[KEY].tab in TABS:
        st.session_state[TAB] = st.session_state[KEY].tab


def _apply_setting() -> None:
    try:
        take_proposal(st.session_state[KEY].setting)
    except ValueError as error:
        st.session_state[ERROR] = f"The setting was not applied. {error}"


def welcome(server: Services, found: Devices, refused: str | None) -> None:
    """Draw the actions without a run; `refused` is why Start run is disabled, or None."""
    best = found.devices[0]
    st.markdown("#### No run is shown")
    connections(server)
    warn_of_unreadable(server.run_list.unreadable())
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
        st.code(terminal_command(server.runs, "watch train.py"), language=None, wrap_lines=True)
        st.caption(f"The run appears here, and its files in `{server.runs.absolute()}`.")
    with right, st.container(border=True, height="stretch", key="welcome_demo"):
        st.markdown("##### Try a demo")
        examples(server)


def terminal_command(runs: Path, words: str) -> str:
    """Return the shell command of `stepscope WORDS` that records into `runs`, from any folder."""
    installed = Path(sys.executable).with_name("stepscope")
    on_path = shutil.which("stepscope") is not None or not installed.exists()
    command = "stepscope" if on_path else str(installed)
    folder = shlex.quote(str(runs.absolute()))
    return f"STEPSCOPE_RUNS={folder} {shlex.quote(command)} {words}"


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
    choose(run_id)
    st.switch_page("views/run.py", query_params={"run": run_id})
