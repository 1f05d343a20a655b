"""The command buttons: what each does and, for a given run, why it cannot; pure."""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.charts.content import run_kind, training_device
from dashboard.format import escape_markdown
from stepscope.recording.recorder import CommandName
from stepscope.run import RunInfo, RunKind, RunStatus, read_only_reason


@dataclass(frozen=True, slots=True)
class Action:
    """One command button; `script_help` is for a run whose loop is not ours."""

    name: CommandName
    label: str
    icon: str
    help: str
    script_help: str | None = None


ACTIONS = (
    Action(
        CommandName.PAUSE,
        "Pause",
        ":material/pause:",
        "Hold at the next step boundary.",
        "Hold at the script's next optimizer step.",
    ),
    Action(CommandName.RESUME, "Resume", ":material/play_arrow:", "Go on after a pause."),
    Action(
        CommandName.STOP,
        "Stop",
        ":material/stop:",
        "End the run after this step; what it recorded stays.",
        "As Ctrl-C at the script's next optimizer step; press again for SIGTERM, then SIGKILL. "
        "What it recorded stays.",
    ),
    Action(
        CommandName.EMPTY_CACHE,
        "Empty cache",
        ":material/mop:",
        "torch.cuda.empty_cache(): give cached blocks back to the driver. "
        "It cannot free memory that tensors hold.",
    ),
    Action(
        CommandName.RESET_PEAKS,
        "Reset peak stats",
        ":material/restart_alt:",
        "Start the peak values anew from what is in use now.",
    ),
    Action(
        CommandName.COLLECT_GARBAGE,
        "Collect garbage",
        ":material/recycling:",
        "gc.collect(): free Python objects, and tensors, that only cycles keep alive.",
    ),
    Action(
        CommandName.MEMORY_SNAPSHOT,
        "Memory snapshot",
        ":material/photo_camera:",
        "Record the CUDA allocations of one step, at most 100 000 of them, with the lines of "
        "code that made them, and keep the file in the run folder: for pytorch.org/memory_viz.",
    ),
    Action(
        CommandName.SAVE_CHECKPOINT,
        "Save checkpoint",
        ":material/save:",
        "Write model, optimizer, schedule and random state to a file named by the step.",
    ),
)
MARK = Action(
    CommandName.MARK,
    "Mark event",
    ":material/flag:",
    "Put a marker with this text on all charts, with the numbers of the moment.",
)

CAN_WAIT = {CommandName.STOP, CommandName.MARK}
"""What a script may be asked before its first step: it is done then, or when patience is over."""


def supported_commands(run: RunInfo) -> frozenset[str]:
    """Return the commands that the run answers."""
    listed = run.run_json.get("commands")
    if isinstance(listed, list):
        return frozenset(name for name in listed if isinstance(name, str))
    return frozenset(CommandName) - {CommandName.MEMORY_SNAPSHOT}


def help_of(action: Action, run: RunInfo | None) -> str:
    """Return what the button does and, where it is disabled, why; as Markdown."""
    ours = run is None or run_kind(run) is RunKind.TRAINER
    text = action.help if ours else action.script_help or action.help
    reason = refusal(action.name, run)
    return f"{text} Not now: {escape_markdown(reason)}" if reason else text


def refusal(name: CommandName, run: RunInfo | None) -> str | None:
    """Say in a sentence why the run cannot be asked this now; None where it can."""
    if run is None:
        return "no run is shown."
    foreign = read_only_reason(run)
    if foreign is not None:
        return foreign
    if not run.status.live:
        return f"the run has ended ({run.status})."
    if name not in supported_commands(run):
        return _not_offered(name, run)
    return _not_in(run.status, name, run_kind(run))


def _not_offered(name: CommandName, run: RunInfo) -> str:
    kind = run_kind(run)
    if kind is RunKind.RECORD:
        return "a recording has no training to act on."
    if name is CommandName.SAVE_CHECKPOINT and kind in (RunKind.WATCH, RunKind.INIT):
        return "a watched script saves its own checkpoints."
    if name is CommandName.MEMORY_SNAPSHOT and training_device(run) == "cpu":
        return "it needs CUDA, and on the CPU torch keeps no history of allocations."
    if name is CommandName.MEMORY_SNAPSHOT and training_device(run) is None:
        return "it needs CUDA, and the script has made no optimizer step yet."
    return "this run does not answer it."


def _not_in(status: RunStatus, name: CommandName, kind: RunKind) -> str | None:
    if status is RunStatus.PENDING:
        if name in CAN_WAIT and kind is not RunKind.TRAINER:
            return None
        return "the first step has not been made yet."
    if name is CommandName.PAUSE and status is RunStatus.PAUSED:
        return "the run is paused already."
    if name is CommandName.RESUME and status is not RunStatus.PAUSED:
        return "the run is not paused."
    return None
