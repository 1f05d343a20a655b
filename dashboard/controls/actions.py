"""The buttons of a run: their labels and, for a given run, why they are disabled; pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.charts.run_view import run_kind
from stepscope.common.config_issue import ConfigIssue
from stepscope.remote.access import read_only_reason
from stepscope.run import RunInfo, RunKind, RunStatus, is_local
from stepscope.store.recorder import CommandName

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One button; `script_help` is its help for runs that are not built-in.

    `memory`: next to the memory chart. `waiting`: until the answer, if that takes more than a step.
    """

    name: CommandName
    label: str
    help: str
    script_help: str | None = None
    memory: bool = False
    waiting: str | None = None


ACTIONS = (
    Action(
        CommandName.PAUSE,
        "Pause",
        "Pause at the next step boundary.",
        "Pause at the script's next optimizer step.",
    ),
    Action(CommandName.RESUME, "Resume", "Continue training."),
    Action(
        CommandName.STOP,
        "Stop",
        "Stop after the current step. Recorded data is kept.",
        "Acts as Ctrl-C at the script's next optimizer step; press again for SIGTERM, then "
        "SIGKILL. Recorded data is kept.",
    ),
    Action(CommandName.MARK, "Mark", "Add an annotation to all charts, with the current values."),
    Action(
        CommandName.EMPTY_CACHE,
        "Empty cache",
        "torch.cuda.empty_cache(): return cached blocks to the driver. Cannot free memory held "
        "by tensors.",
        memory=True,
    ),
    Action(
        CommandName.RESET_PEAKS,
        "Reset peak stats",
        "Reset the peaks to current usage.",
        memory=True,
    ),
    Action(
        CommandName.COLLECT_GARBAGE,
        "Collect garbage",
        "gc.collect(): free Python objects, including tensors, that are alive only through "
        "reference cycles.",
        memory=True,
    ),
    Action(
        CommandName.MEMORY_SNAPSHOT,
        "Memory snapshot",
        "Record the CUDA allocations of the next steps (the newest 100,000) with their source "
        "lines, into a file in the run folder. Open it on the Memory tab.",
        memory=True,
        waiting="sent. Recording the next steps…",
    ),
    Action(
        CommandName.PROFILE,
        "Profile…",  # not the label of the tab
        "Record the next steps with the PyTorch profiler: operators and a Perfetto trace. "
        "Profiled steps are slower, and training pauses at the end while they are summed up.",
        waiting="sent. Timing a few steps for comparison, then profiling, then writing files…",
    ),
    Action(
        CommandName.SAVE_CHECKPOINT,
        "Save checkpoint",
        "Save model, optimizer, scheduler and RNG state to step-N.pt.",
    ),
)
END_NOW = "end_now"  # Not a command of a run: the server ends a run that does not stop.
END_NOW_S = 10.0  # Age of a Stop, or of the last heartbeat, from which Force stop is offered.
FORCE_STOP = {
    "name": END_NOW,
    "label": "Force stop",
    "help": "Kill all processes of the run on this host: SIGTERM, then SIGKILL after 5 s. Recorded "
    "data is kept; unsaved training state is lost.",
    "memory": False,
    "waiting": "the processes are being ended…",
    "when": {status.value: None for status in RunStatus if status.live},
}
CAN_WAIT = {CommandName.STOP, CommandName.MARK}  # accepted before a script's first step


def supported_commands(run: RunInfo) -> frozenset[str]:
    listed = run.run_json.get("commands")
    if listed is not None:
        return frozenset(listed)
    return frozenset(CommandName) - {CommandName.MEMORY_SNAPSHOT, CommandName.PROFILE}


def start_refusal(busy: str | None, problems: Sequence[ConfigIssue]) -> str | None:
    """Return why Start run is disabled: the server is busy, or the settings cannot run."""
    if busy is not None or not problems:
        return busy
    return "These settings cannot run. " + " ".join(map(str, problems))


def buttons(run: RunInfo | None) -> list[Json]:
    """Return the buttons of a live run of this user; none for any other run.

    `when` maps each status to the disabled reason or None: buttons follow the polled status.
    """
    if run is None or not run.status.live or read_only_reason(run) is not None:
        return []
    kind = run_kind(run)
    return [
        {
            "name": action.name.value,
            "label": action.label,
            "help": (kind is not RunKind.TRAINER and action.script_help) or action.help,
            "memory": action.memory,
            "waiting": action.waiting,
            "when": {
                status.value: _not_in(status, action.name, kind)
                for status in RunStatus
                # Only one of Pause and Resume is drawn.
                if status.live
                and action.name
                is not (CommandName.PAUSE if status is RunStatus.PAUSED else CommandName.RESUME)
            },
        }
        for action in ACTIONS
        if action.name in supported_commands(run)
    ] + ([FORCE_STOP] if can_end_now(run) else [])


def can_end_now(run: RunInfo) -> bool:
    """Return True for a script or job of this host that does not stop or has no heartbeat.

    A built-in training of one process may be in the server itself.
    """
    if not run.status.live or not is_local(run) or read_only_reason(run) is not None:
        return False
    asked = run.run_json.get("stop_asked")
    late = asked is not None and time.time() - asked > END_NOW_S
    is_script = run_kind(run) in (RunKind.WATCH, RunKind.INIT)
    may_end = is_script or run.world_size > 1
    return may_end and (late or run.heartbeat_age_s > END_NOW_S)


def refusal(name: CommandName, run: RunInfo) -> str | None:
    """Return why the run cannot execute a command now, as a sentence; None if it can."""
    foreign = read_only_reason(run)
    if foreign is not None:
        return foreign
    if not run.status.live:
        return f"the run has ended ({run.status})."
    if name not in supported_commands(run):
        return "this run does not support it."
    return _not_in(run.status, name, run_kind(run))


def _not_in(status: RunStatus, name: CommandName, kind: RunKind) -> str | None:
    if status is RunStatus.PENDING:
        waits = name in CAN_WAIT and kind is not RunKind.TRAINER
        return None if waits else "the first step has not finished yet."
    if name is CommandName.PAUSE and status is RunStatus.PAUSED:
        return "the run is already paused."
    if name is CommandName.RESUME and status is not RunStatus.PAUSED:
        return "the run is not paused."
    return None
