"""The row of buttons. Each writes a command into the run folder and returns at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from dashboard.services import Services
from stepscope.recorder import CommandName
from stepscope.run import RunError, RunInfo, RunStatus
from stepscope.store import StoreError
from stepscope.store.reader import ask, new_command_id
from trainer.config import Problem, RunConfig

ERROR = "command_error"
PENDING = "pending_command"
STARTED = "run_started"
ASKED = "asked_command"


@dataclass(frozen=True, slots=True)
class Action:
    """One command button."""

    name: CommandName
    label: str
    icon: str
    help: str


ACTIONS = (
    Action(CommandName.PAUSE, "Pause", ":material/pause:", "Hold at the next step boundary."),
    Action(CommandName.RESUME, "Resume", ":material/play_arrow:", "Go on after a pause."),
    Action(CommandName.STOP, "Stop", ":material/stop:",
           "End the run after this step; what it recorded stays."),
    Action(CommandName.EMPTY_CACHE, "Empty cache", ":material/mop:",
           "torch.cuda.empty_cache(): give cached blocks back to the driver. "
           "It cannot free memory that tensors hold."),
    Action(CommandName.RESET_PEAKS, "Reset peak stats", ":material/restart_alt:",
           "Start the peak values anew from what is in use now."),
    Action(CommandName.COLLECT_GARBAGE, "Collect garbage", ":material/recycling:",
           "gc.collect(): free Python objects, and tensors, that only cycles keep alive."),
    Action(CommandName.SAVE_CHECKPOINT, "Save checkpoint", ":material/save:",
           "Write model, optimizer, schedule and random state to a file named by the step."),
)  # fmt: skip


def command_bar(
    server: Services, config: RunConfig, wrong: Sequence[Problem], run: RunInfo | None
) -> None:
    """Draw the buttons. A click's command id is then `st.session_state[PENDING]`."""
    status = run.status if run is not None else None
    with st.container(horizontal=True, key="commands", vertical_alignment="bottom", gap="small"):
        _start_button(server, config, wrong)
        for action in ACTIONS:
            st.button(
                action.label, icon=action.icon, help=action.help, key=f"do_{action.name}",
                disabled=not _possible(action.name, status),
                on_click=_ask, args=(action.name,),
            )  # fmt: skip
        _mark_button(status)
    error = st.session_state.pop(ERROR, None)
    if error:
        show_error(error)


def show_error(sentence: str) -> None:
    """Draw what went wrong."""
    st.error(sentence, icon=":material/error:")


def _start_button(server: Services, config: RunConfig, wrong: Sequence[Problem]) -> None:
    active = server.active_id()
    if active:
        text = f"One run at a time: {active} is active. Stop it first."
    elif wrong:
        text = "These settings cannot run. " + " ".join(map(str, wrong))
    else:
        text = "Train with the settings in the sidebar."
    st.button(
        "Start", icon=":material/rocket_launch:", type="primary", key="start", help=text,
        disabled=bool(active or wrong), on_click=_start, args=(server, config),
    )  # fmt: skip


def _mark_button(status: RunStatus | None) -> None:
    idle = not _possible(CommandName.MARK, status)
    st.text_input("Event text", key="mark_text", placeholder="what happened", max_chars=200,
                  width=160, disabled=idle, label_visibility="collapsed",
                  help="A note for Mark event.")  # fmt: skip
    st.button("Mark event", icon=":material/flag:", key="do_mark", disabled=idle,
              help="Put a marker with this text on all charts, with the numbers of the moment.",
              on_click=_mark)  # fmt: skip


def _possible(name: CommandName, status: RunStatus | None) -> bool:
    if name is CommandName.PAUSE:
        return status is RunStatus.RUNNING
    if name is CommandName.RESUME:
        return status is RunStatus.PAUSED
    return status in (RunStatus.RUNNING, RunStatus.PAUSED)


def _start(server: Services, config: RunConfig) -> None:
    try:
        folder = server.start(config)
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The run could not start. {error}"
        return
    st.session_state["run"] = folder.name
    st.session_state[PENDING] = None
    st.session_state[STARTED] = True


def _mark() -> None:
    text = st.session_state["mark_text"].strip() or "marked"
    st.session_state["mark_text"] = ""
    _ask(CommandName.MARK, text=text)


def _ask(name: CommandName, **args: str) -> None:
    command_id = new_command_id()
    st.session_state[PENDING] = command_id
    # A list: a second click ends the script run of the first, perhaps before it has sent.
    st.session_state.setdefault(ASKED, []).append((command_id, name, args))


def send_asked(run: RunInfo | None) -> None:
    """Write the commands of the last clicks into the run folder.

    Called after the charts are drawn with their id: the page answers a click at once, and the 30 ms
    that SQLite takes beside a busy training thread pass meanwhile.
    """
    asked = st.session_state.get(ASKED, [])
    while asked and run is not None:
        command_id, name, args = asked.pop(0)
        try:
            ask(run.folder, name, args, command_id)
        except StoreError as error:
            st.session_state[PENDING] = None
            show_error(str(error))
