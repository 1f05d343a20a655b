"""The buttons: what each does and, for a given run, when it cannot; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.charts.run_view import run_kind
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo, RunKind, RunStatus, read_only_reason
from stepscope.run.rank_info import now_of
from trainer.config import ConfigIssue

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One button; `script_help` is for a run whose loop is not ours.

    `memory`: it stands beside the memory chart, where its effect shows. `waiting` is said until the
    answer comes, where that takes more than the end of a step.
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
        (
            "gc.collect(): free Python objects, tensors included, that only reference cycles keep "
            "alive."
        ),
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
        "Profile",
        "Record the next steps with the PyTorch profiler: operators, stacks and a Perfetto "
        "trace. Profiled steps are slower (1.25× to 2.3× on the CPUs measured), and training "
        "pauses briefly at the end.",
        waiting="sent. Timing a few steps for comparison, then profiling, then writing files…",
    ),
    Action(
        CommandName.SAVE_CHECKPOINT,
        "Save checkpoint",
        "Save model, optimizer, scheduler and RNG state to step-N.pt.",
    ),
)
END_NOW = "end_now"
"""No command of a run, but an act of the server: for a job that does not hear one any more."""
END_NOW_S = 10.0
"""Age of a Stop, or of a job's last sign of life, from which Force stop is offered."""
CAN_WAIT = {CommandName.STOP, CommandName.MARK}
"""What a script may be asked before its first step: it is done then, or when patience is over."""


def supported_commands(run: RunInfo) -> frozenset[str]:
    """Return the commands that the run answers."""
    listed = run.run_json.get("commands")
    if isinstance(listed, list):
        return frozenset(name for name in listed if isinstance(name, str))
    return frozenset(CommandName) - {CommandName.MEMORY_SNAPSHOT, CommandName.PROFILE}


def start_refusal(busy: str | None, problems: Sequence[ConfigIssue]) -> str | None:
    """Return why Start run is disabled: the server is busy, or the settings cannot run."""
    if busy is not None or not problems:
        return busy
    return "These settings cannot run. " + " ".join(map(str, problems))


def buttons(run: RunInfo | None) -> list[Json]:
    """Return the buttons that the run can have, none for a run that is over or of others.

    `when` tells for each status in which a button is drawn why it cannot be pressed then; None
    where it can. So a button follows the status that the browser polls.
    """
    if run is None or not run.status.live or read_only_reason(run) is not None:
        return []
    ours = run_kind(run) is RunKind.TRAINER
    return [
        {
            "name": action.name.value,
            "label": action.label,
            "help": action.help if ours else action.script_help or action.help,
            "memory": action.memory,
            "waiting": action.waiting,
            "when": {
                status.value: _not_in(status, action.name, run_kind(run))
                for status in RunStatus
                if status.live and _drawn_in(status, action.name)
            },
        }
        for action in ACTIONS
        if action.name in supported_commands(run)
    ] + ([_end_now()] if can_end_now(run) else [])


def can_end_now(run: RunInfo) -> bool:
    """Say whether a job is to be ended by force: it does not stop, or gives no sign of life."""
    if not run.status.live or read_only_reason(run) is not None:
        return False
    asked = run.run_json.get("stop_asked")
    late = isinstance(asked, int | float) and now_of(run.run_json) - asked > END_NOW_S
    several = run.run_json.get("world_size", 1) != 1
    return several and (late or run.heartbeat_age_s > END_NOW_S)


def _end_now() -> Json:
    return {
        "name": END_NOW,
        "label": "Force stop",
        "help": "Kill all ranks on this host: SIGTERM, then SIGKILL after 5 s. Recorded data "
        "is kept; unsaved training state is lost.",
        "memory": False,
        "waiting": "the ranks are being ended…",
        "when": {status.value: None for status in RunStatus if status.live},
    }


def refusal(name: CommandName, run: RunInfo) -> str | None:
    """Say in a sentence why the run cannot be asked this now; None where it can."""
    foreign = read_only_reason(run)
    if foreign is not None:
        return foreign
    if not run.status.live:
        return f"the run has ended ({run.status})."
    if name not in supported_commands(run):
        return "this run does not support it."
    return _not_in(run.status, name, run_kind(run))


def _drawn_in(status: RunStatus, name: CommandName) -> bool:
    """Pause and Resume share one place."""
    paused = status is RunStatus.PAUSED
    return not (name is CommandName.PAUSE and paused) and (name is not CommandName.RESUME or paused)


def _not_in(status: RunStatus, name: CommandName, kind: RunKind) -> str | None:
    if status is RunStatus.PENDING:
        if name in CAN_WAIT and kind is not RunKind.TRAINER:
            return None
        return "the first step has not finished yet."
    if name is CommandName.PAUSE and status is RunStatus.PAUSED:
        return "the run is already paused."
    if name is CommandName.RESUME and status is not RunStatus.PAUSED:
        return "the run is not paused."
    return None
