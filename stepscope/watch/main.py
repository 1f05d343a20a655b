"""`stepscope watch script.py`: runs a script unchanged, and records it.

The script is the `__main__` of this very process: its arguments, exit code, signals and output are
its own. Its run is closed by the first of all atexit handlers, and so after all of its own.

    stepscope watch [--name NAME] [--runs DIR] [--time-collectives] script.py [arguments]
    stepscope watch [--name NAME] [--runs DIR] -m package.module [arguments]
    torchrun --nproc-per-node 2 -m stepscope.watch script.py [arguments]
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from stepscope import tracker
from stepscope.diagnosis.outcome import Outcome, outcome
from stepscope.run import RunKind, RunStatus, runs_root
from stepscope.run.ranks import RankError, announce, find_place, say
from stepscope.session.script import ScriptSession
from stepscope.store import StoreError
from stepscope.watch import hooks
from stepscope.watch.hooks import Hooks
from stepscope.watch.output import keep_output
from stepscope.watch.script import NoScript, Script, from_file, from_module

log = logging.getLogger(__name__)

OUR_FOLDER = Path(__file__).parent
NCCL_TIMING = "TORCH_NCCL_ENABLE_TIMING"
"""torch reads it when the script makes a process group."""


@dataclass(slots=True)
class _Run:
    """What is recorded of the script, if anything could be; it ends with the process."""

    session: ScriptSession | None
    hooks: Hooks | None = None
    tells: bool = True
    """Of several ranks of a machine one talks on the terminal."""
    outcome: Outcome = field(default_factory=Outcome)
    pid: int = field(default_factory=os.getpid)

    def ended_by(self, error: BaseException) -> None:
        self.outcome = outcome(error)
        if self.session is not None:
            self.outcome = self.session.failed(self.outcome, error)

    def close(self) -> None:
        """End the run; one of which nothing could be recorded says why. Not in a forked child."""
        if self.session is None or os.getpid() != self.pid:
            return
        nothing = self.hooks.end() if self.hooks is not None else None
        if nothing is not None and self.outcome.status is RunStatus.FINISHED:
            self.outcome = replace(self.outcome, reason=nothing)
            if self.tells:
                say(f"stepscope: {nothing}")
        self.session.close(self.outcome.status, self.outcome.reason)


def main(argv: Sequence[str]) -> int:
    """Run the script that `argv` names; return 0, or an exit code where there is none.

    What ends the script leaves this function: the interpreter does with it what it always does.
    """
    options, words = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(words[0], words[1:])
    except NoScript as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    except BaseException as error:
        _hide_our_frames(error)
        raise
    if options.time_collectives:
        os.environ[NCCL_TIMING] = "1"
    run = _start(script, options)
    atexit.register(run.close)
    # What was imported for the recording stays: a full collection need not walk all of it.
    gc.freeze()
    try:
        script.run()
    except BaseException as error:
        _hide_our_frames(error)
        run.ended_by(error)
        raise
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split our options from the script and all that follows it, which is the script's."""
    parser = argparse.ArgumentParser(
        prog="stepscope watch",
        usage="%(prog)s [--name NAME] [--runs DIR] [--time-collectives] "
        "(script.py | -m module) [arguments]",
        description="Run a training script unchanged and record it: loss, learning rate, times, "
        "memory and GPUs, live on the page of 'stepscope ui'.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", help="name of the run (default: the script's)")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="folder of all runs (default: STEPSCOPE_RUNS, or runs/)",
    )
    parser.add_argument(
        "--time-collectives",
        action="store_true",
        help=f"have NCCL time its collectives ({NCCL_TIMING}=1); this may lessen how much they "
        "overlap with computing",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="what follows is a module's name, as for python -m",
    )
    ours = 0
    while ours < len(argv) and argv[ours].startswith("-"):
        word = argv[ours]
        ours += 2 if word in ("--name", "--runs") else 1
        if word in ("-m", "--"):
            break
    options = parser.parse_args([word for word in argv[:ours] if word != "--"])
    if ours >= len(argv):
        parser.error("which script? Name a file, or a module after -m.")
    return options, list(argv[ours:])


def _start(script: Script, options: argparse.Namespace) -> _Run:
    """Make the run and everything that fills it; where that fails the script runs unwatched."""
    name = options.name or script.name
    try:
        place = find_place(runs_root(options.runs), name, os.environ)
        session = ScriptSession(place, name=name, kind=RunKind.WATCH)
        session.recorder.describe(
            script={"path": script.path, "arguments": sys.argv[1:], "cwd": str(Path.cwd())}
        )
    except (OSError, StoreError, RankError) as error:
        say(f"stepscope: not watched, no run folder could be made: {error}")
        return _Run(None)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with us, the script has to run
        say(f"stepscope: not watched: {type(error).__name__}: {error}")
        return _Run(None)
    announce(place, options.runs)
    try:
        keep_output(
            session.recorder.folder,
            place.number,
            lambda text: session.recorder.event("output_lost", text),
        )
    except Exception as error:  # noqa: BLE001 - as above
        session.recorder.event("output_lost", f"What the script prints is not kept: {error}")
    run = _Run(session, tells=place.local_rank == 0)
    try:
        tracker.attach(session)
        run.hooks = hooks.install(session)
    except Exception as error:  # as above
        log.warning("stepscope: the script's steps will not be recorded", exc_info=True)
        session.recorder.event("hook_failed", f"Nothing of the script's steps is recorded: {error}")
    return run


def _hide_our_frames(error: BaseException) -> None:
    """Have the traceback begin in the script, and go to whatever hook the script has set."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == OUR_FOLDER:
        trace = trace.tb_next
    error.__traceback__ = trace
    print_it = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, shown: TracebackType | None) -> None:
        if value is error:  # it has passed our frames again on its way out
            value.__traceback__ = shown = trace
        print_it(kind, value, shown)

    sys.excepthook = hook
