"""The row of buttons. Each writes a command into the run folder and returns at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import streamlit as st

from dashboard.controls.actions import ACTIONS, MARK, Action, help_of, refusal
from dashboard.format import escape_markdown
from dashboard.services import Services
from stepscope.recording.recorder import CommandName
from stepscope.run import RunError, RunInfo, read_only_reason
from stepscope.session.stopping import SIGNALS, kill_unheard
from stepscope.store import StoreError
from stepscope.store.reader import new_command_id, send_command
from trainer.config import Problem, RunConfig

ERROR = "command_error"
PENDING = "pending_command"
STARTED = "run_started"
ASKED = "asked_command"
STOPS = "stops_asked"


def command_bar(
    server: Services, config: RunConfig, problems: Sequence[Problem], run: RunInfo | None
) -> None:
    """Draw the buttons. A click's command id is then `st.session_state[PENDING]`."""
    with st.container(horizontal=True, key="commands", vertical_alignment="bottom", gap="small"):
        _start_button(server, config, problems)
        for action in ACTIONS:
            _button(action, run)
        _mark_button(run)
    foreign = read_only_reason(run) if run is not None else None
    if foreign:
        st.caption(f":material/visibility: {escape_markdown(foreign)}")
    error = st.session_state.pop(ERROR, None)
    if error:
        show_error(error)


def show_error(sentence: str) -> None:
    """Draw what went problems."""
    st.error(sentence, icon=":material/error:")


def _start_button(server: Services, config: RunConfig, problems: Sequence[Problem]) -> None:
    active = server.active_id()
    if active:
        text = f"One run at a time: {active} is active. Stop it first."
    elif problems:
        text = "These settings cannot run. " + " ".join(map(str, problems))
    else:
        text = "Train with the settings in the sidebar."
    st.button(
        "Start",
        icon=":material/rocket_launch:",
        type="primary",
        key="start",
        help=text,
        disabled=bool(active or problems),
        on_click=_start,
        args=(server, config),
    )


def _button(action: Action, run: RunInfo | None) -> None:
    st.button(
        action.label,
        icon=action.icon,
        help=help_of(action, run),
        key=f"do_{action.name}",
        disabled=refusal(action.name, run) is not None,
        on_click=_ask,
        args=(action.name, run.id if run else ""),
    )


def _mark_button(run: RunInfo | None) -> None:
    idle = refusal(MARK.name, run) is not None
    st.text_input(
        "Event text",
        key="mark_text",
        placeholder="what happened",
        max_chars=200,
        width=160,
        disabled=idle,
        label_visibility="collapsed",
        help="A note for Mark event.",
    )
    st.button(
        MARK.label,
        icon=MARK.icon,
        key="do_mark",
        disabled=idle,
        help=help_of(MARK, run),
        on_click=_mark,
        args=(run.id if run else "",),
    )


def _start(server: Services, config: RunConfig) -> None:
    try:
        folder = server.start(config)
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The run could not start. {error}"
        return
    st.session_state["run"] = folder.name
    st.session_state[PENDING] = None
    st.session_state[STARTED] = True


def _mark(run_id: str) -> None:
    text = st.session_state["mark_text"].strip() or "marked"
    st.session_state["mark_text"] = ""
    _ask(CommandName.MARK, run_id, text=text)


def _ask(name: CommandName, run_id: str, **args: str) -> None:
    command_id = new_command_id()
    st.session_state[PENDING] = command_id
    # A list: a second click ends the script run of the first, perhaps before it has sent.
    st.session_state.setdefault(ASKED, []).append((command_id, run_id, name, args))


def send_asked(run: RunInfo | None) -> None:
    """Write the commands of the last clicks into the run folder.

    Called after the charts are drawn with their id: the page answers a click at once, and the 30 ms
    that SQLite takes beside a busy training thread pass meanwhile. A button may have been drawn
    before the run ended, or by a browser that enables what it likes: what the run cannot be asked
    now is refused here.
    """
    asked = st.session_state.get(ASKED, [])
    while asked and run is not None:
        command_id, run_id, name, args = asked.pop(0)
        reason = refusal(name, run)
        if run_id != run.id:
            reason = f"it was meant for {run_id}, and {run.id} is shown now."
        try:
            if reason is not None:
                raise StoreError(f"{name.replace('_', ' ').capitalize()} was not sent: {reason}")
            if name is not CommandName.STOP or not _stopped_unheard(run):
                send_command(run.folder, name, args, command_id)
        except StoreError as error:
            st.session_state[PENDING] = None
            show_error(str(error))


def _stopped_unheard(run: RunInfo) -> bool:
    """Do what the last of several Stops asks where the script hears none of them."""
    asked = st.session_state.setdefault(STOPS, Counter())
    asked[run.id] += 1
    said = kill_unheard(run) if asked[run.id] >= len(SIGNALS) else None
    if said is not None:
        st.session_state[PENDING] = None
        st.warning(said, icon=":material/stop:")
    return said is not None
