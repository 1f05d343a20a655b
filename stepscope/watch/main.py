"""`stepscope watch script.py`: run an unchanged script, and record it.

The script is the `__main__` of this process, with its arguments, exit code, signals and output. Its
run is closed by the first registered atexit handler, and so after the script's handlers.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stepscope.distributed.rendezvous import RankContext, launch
from stepscope.session.code_state import GIT_VARIABLE
from stepscope.session.script_session import handle_exec
from stepscope.session.stop import handlers_wait
from stepscope.settings import SettingError, parse
from stepscope.tracker import annotate
from stepscope.watch.script import ScriptNotFoundError, from_file, from_module, split_options
from stepscope.watch.watched_run import begin, follow

PACKAGE_FOLDER = Path(__file__).parent


def main(argv: Sequence[str]) -> int:
    """Run the script named in `argv`; return 0, or an exit code if the script is not found.

    Raises the exception that ended the script, which the interpreter handles as usual.
    """
    options, command = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(command[0], command[1:])
    except ScriptNotFoundError as error:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return error.code
    except BaseException as error:
        _hide_own_frames(error)
        raise
    if options.no_git:
        os.environ[GIT_VARIABLE] = "0"
    words = " ".join(options.settings)
    place = _rank_of(options.rank_of)
    run = begin(options.name or script.name, script.path, options.runs, place, words)
    annotate(run.session, tags=options.tag, group=options.group, note=options.note)
    follow(run)
    handle_exec(run.close_before_exec)
    atexit.register(run.close)
    gc.freeze()  # excludes the imported modules from full collections
    try:
        script.run()
    except BaseException as error:
        with handlers_wait():
            # The script may have deleted its excepthook, or hide the exception's traceback.
            with contextlib.suppress(Exception):
                _hide_own_frames(error)
            run.ended_by(error)
        raise
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the options of `stepscope watch` from the script and its arguments."""
    parser = argparse.ArgumentParser(
        prog="stepscope watch",
        usage="%(prog)s [--name NAME] [--runs DIR] [--tag TAG] [--group GROUP] [--note NOTE] "
        "[--no-git] [--with SETTINGS] (script.py | -m module) [arguments]",
        description="Run a training script unchanged and record loss, learning rate, timings, "
        "memory and GPUs, live in 'stepscope ui'.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", help="name of the run (default: the script's)")
    text = "folder of all runs (default: STEPSCOPE_RUNS, or runs/)"
    add("--runs", type=Path, metavar="DIR", help=text)
    add("--tag", action="append", default=[], help="tag of the run; repeatable")
    add("--group", help="group of the run, such as an experiment of several runs")
    add("--note", help="note about the run")
    text = f"do not record the git commit and uncommitted changes ({GIT_VARIABLE}=0)"
    add("--no-git", action="store_true", help=text)
    text = 'apply settings to the script, such as "tf32 num_workers=4"; see docs/watch.md'
    add("--with", dest="settings", metavar="SETTINGS", action="append", default=[], help=text)
    add("-m", dest="module", action="store_true", help="run a module, like python -m")
    # Internal: for the ranks that Lightning starts.
    add("--rank-of", type=Path, help=argparse.SUPPRESS)
    options, words = split_options(parser, argv)
    try:
        parse(options.settings)
    except SettingError as error:
        parser.error(f"--with: {error}")
    return options, words


def _rank_of(folder: Path | None) -> RankContext | None:
    """Return the place of this process in the run of its watched parent process, if any."""
    if folder is None:
        return None
    job = launch(os.environ)
    return RankContext(folder, job.rank, job.rank, job.local_rank, job.world_size)


def _hide_own_frames(error: BaseException) -> None:
    """Remove the frames of this package from the traceback, also for the script's excepthook."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == PACKAGE_FOLDER:
        trace = trace.tb_next
    error.with_traceback(trace)  # also of an exception that refuses attributes
    former_hook = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, shown: TracebackType | None) -> None:
        if value is error:  # raised again through the frames of this package
            value.with_traceback(trace)
            shown = trace
        former_hook(kind, value, shown)

    sys.excepthook = hook
