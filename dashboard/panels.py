"""What stands around the charts: the run picker, the empty page and a run's details."""

from __future__ import annotations

import functools

import streamlit as st

from dashboard import controls
from dashboard.format import format_bytes
from dashboard.services import Devices, Services
from stepscope.run import RunInfo
from trainer.config import ConfigError, RunConfig

_TEXT_LIMIT = 20_000


def run_picker(server: Services) -> str | None:
    """Draw the title and the list of runs; return the picked run's id, None for none.

    A run named in the URL wins, then the active one.
    """
    state = st.session_state
    if "run" not in state:
        state["run"] = st.query_params.get("run") or server.active_id()
    options = [run.id for run in server.list_runs()]
    if state["run"] and state["run"] not in options:
        options.insert(0, state["run"])
    title, picker = st.columns([1, 2], vertical_alignment="bottom")
    title.markdown("### Stepscope")
    if options:
        picker.selectbox(
            "Run", options, key="run", index=None, placeholder="Choose a recorded run",
            label_visibility="collapsed", help="Live runs first, then the newest.",
        )  # fmt: skip
    picked: str | None = state["run"]
    return picked


def empty_page(server: Services, found: Devices) -> None:
    """Say what to do when there is nothing to show."""
    best = found.devices[0]
    with st.container(border=True, key="empty"):
        st.markdown(
            "#### Nothing is running yet\n"
            f"Training would run on **{best.name}** ({format_bytes(best.memory_total)}). "
            "Choose a workload and a precision on the left, then press **Start**: loss, memory "
            "and utilisation appear here and move on while you watch. Or pick a recorded run above."
        )
        if found.cuda_reason:
            st.caption(
                f"{found.cuda_reason} Everything else works: on a CPU run the memory chart shows "
                "the memory of the process, because torch keeps no allocated and reserved "
                "counters for the CPU."
            )
        examples = [run for run in server.list_runs() if run.folder.parent == server.examples]
        for run in examples:
            st.button(f"Open the recorded demonstration {run.id}", key=f"open_{run.id}",
                      on_click=_open, args=(run.id,))  # fmt: skip


def details(server: Services, run: RunInfo) -> None:
    """Draw what went wrong, the checkpoints, and the facts of a run."""
    _text_file(run, "traceback.txt", "Traceback")
    _text_file(run, "worker.log", "Output of the training process")
    checkpoints = sorted(run.folder.glob("*.pt"))
    if checkpoints and not run.status.live:
        _checkpoints(server, run, [path.name for path in checkpoints])
    with st.expander("Settings and environment of this run", icon=":material/info:"):
        hidden = {"capabilities", "fit"}
        st.json({name: value for name, value in run.facts.items() if name not in hidden})


def _checkpoints(server: Services, run: RunInfo, names: list[str]) -> None:
    with st.container(horizontal=True, key="checkpoints"):
        for name in names:
            st.download_button(
                f"Weights of {name}", functools.partial(server.weights, run.id, name),
                file_name=f"{run.id}-{name.removesuffix('.pt')}-weights.pt",
                icon=":material/download:", key=f"weights_{name}", on_click="ignore",
                help="The state_dict alone; load it with torch.load(..., weights_only=True).",
            )  # fmt: skip
        st.button("Resume in a new run", icon=":material/resume:", key="resume_run",
                  on_click=_resume, args=(run, names),
                  help="Put this run's settings and its last checkpoint into the sidebar.",
                  )  # fmt: skip


def _resume(run: RunInfo, names: list[str]) -> None:
    last = "last.pt" if "last.pt" in names else names[-1]
    try:
        config = RunConfig.from_dict({**run.facts["config"], "resume": f"{run.id}/{last}"})
    except (ConfigError, KeyError, TypeError) as error:
        st.session_state["command_error"] = f"This run's settings cannot be used: {error}"
        return
    controls.load(config)


def _open(run_id: str) -> None:
    st.session_state["run"] = run_id


def _text_file(run: RunInfo, name: str, title: str) -> None:
    path = run.folder / name
    try:
        text = path.read_text(errors="replace")[-_TEXT_LIMIT:]
    except OSError:
        return
    if text.strip():
        with st.expander(title, icon=":material/terminal:", expanded=name == "traceback.txt"):
            st.code(text, language=None)
