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
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stepscope.distributed.rendezvous import RankContext, launch
from stepscope.session.stop import handlers_wait
from stepscope.watch.script import ScriptNotFoundError, from_file, from_module
from stepscope.watch.watched_run import begin, follow

OUR_FOLDER = Path(__file__).parent
NCCL_TIMING = "TORCH_NCCL_ENABLE_TIMING"  # torch reads it when the script makes a process group.


def main(argv: Sequence[str]) -> int:
    """Run the script that `argv` names; return 0, or an exit code where there is none.

    What ends the script leaves this function: the interpreter does with it what it always does.
    """
    options, words = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(words[0], words[1:])
    except ScriptNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    except BaseException as error:
        _hide_our_frames(error)
        raise
    if options.time_collectives:
        os.environ[NCCL_TIMING] = "1"
    run = begin(options.name or script.name, script.path, options.runs, _joined(options.rank_of))
    follow(run)
    atexit.register(run.close)
    # What was imported for the recording stays: a full collection need not walk all of it.
    gc.freeze()
    try:
        script.run()
    except BaseException as error:
        with handlers_wait():
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
        description="Run a training script unchanged and record loss, learning rate, timings, "
        "memory and GPUs, live in 'stepscope ui'.",
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
        help=f"time collectives with NCCL ({NCCL_TIMING}=1); may reduce overlap with compute",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, like python -m"
    )
    # Ours alone: a watched process gives it to those that it starts.
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    ours = 0
    while ours < len(argv) and argv[ours].startswith("-"):
        word = argv[ours]
        ours += 2 if word in ("--name", "--runs", "--rank-of") else 1
        if word in ("-m", "--"):
            break
    options = parser.parse_args([word for word in argv[:ours] if word != "--"])
    if ours >= len(argv):
        parser.error("which script? Name a file, or a module after -m.")
    return options, list(argv[ours:])


def _joined(folder: Path | None) -> RankContext | None:
    """Return this process's place in the run of the watched process that has started it."""
    if folder is None:
        return None
    found = launch(os.environ)
    return RankContext(folder, found.rank, found.rank, found.local_rank, found.world_size)


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
