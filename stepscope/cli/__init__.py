"""Console command `stepscope`: one module per command, imported only when that command runs.

So `--version` and `runs` start in 0.1 s. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from stepscope import __version__
from stepscope.common.formatting import printable
from stepscope.run import RunError, runs_root

BROKEN_PIPE = 141  # exit code of a command ended by SIGPIPE, as in `stepscope runs | head -1`
INTERRUPTED = 130
DRIVER_TIMEOUT_S = 15.0
T = TypeVar("T")

COMMANDS = {
    "watch": "run a training script unchanged and record it",
    "devices": "show every GPU of this machine: load, memory, temperature, health, processes",
    "runs": "list recorded runs, live ones first, then newest first",
    "measure-memory": "measure a script's first steps and report how much larger the batch can be",
    "diagnose": "diagnose a run: what its steps wait for, what ended it, what to try next",
    "compare": "compare runs of a change with runs of its baseline",
    "snapshot": "list the live allocations of a PyTorch memory snapshot, or compare two",
    "export": "write a run's values as csv, parquet or TensorBoard event files",
    "report": "write runs, or a sweep, as one HTML file without external references",
    "gc": "delete old runs of this user",
    "exporter": "serve metrics of this machine's GPUs and of live runs to Prometheus",
    "lab": "measure which settings make training faster on this machine",
    "tune": "find the settings that make a training script faster, and print the patch",
    "sample-data": "write 1,797 real digits as image files, data for the workload images",
    "doctor": "check this machine: what works, what is missing, and why",
    "ui": "open the dashboard on this machine's runs",
    "demo": "open the dashboard with a run recorded on an H100",
}
"""Help lines. Each command but OWN_PARSERS is the module `stepscope.cli.NAME`, which has EXAMPLES,
`add_options(parser)` and `run(options, root)`."""

OWN_PARSERS = {
    "watch": "stepscope.watch.main",
    "measure-memory": "stepscope.cli.measure_memory",
    "lab": "stepscope.cli.lab",
    "tune": "stepscope.cli.tune",
    "sample-data": "stepscope.cli.sample_data",
}
"""Commands whose last words belong to a script or a program: modules with `main(arguments)`."""


class CommandError(Exception):
    """A command cannot run; the message has the reason and the fix, `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv:
        parser().print_help(sys.stderr)
        return 2
    if argv[0] in OWN_PARSERS:
        return int(importlib.import_module(OWN_PARSERS[argv[0]]).main(argv[1:]) or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no name may break a listing
    options = parser(argv[0]).parse_args(argv)
    try:
        code = int(options.run(options, runs_root()))
        sys.stdout.flush()
    except (CommandError, RunError) as error:
        print(*map(printable, str(error).split("\n")), sep="\n", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only the module of `command` is imported, to add its options."""
    root = argparse.ArgumentParser(
        prog="stepscope",
        description="Record, list, export and inspect training runs. Runs are stored in "
        "STEPSCOPE_RUNS (default: runs/); RUN is a folder name there.",
        epilog="'stepscope COMMAND --help' shows a command's options and examples.",
    )
    root.add_argument("--version", action="version", version=f"stepscope {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        found = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == command and name not in OWN_PARSERS:
            module = importlib.import_module(f"stepscope.cli.{name}")
            found.epilog = "\n  ".join(("examples:", *module.EXAMPLES))
            module.add_options(found)
            found.set_defaults(run=module.run)
    return root


def call_driver(function: Callable[[], T]) -> T:
    """Call a function in a daemon thread: a driver may block. Raises CommandError after 15 s."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            answer.set_exception(error)

    threading.Thread(target=call, name="stepscope-driver", daemon=True).start()
    try:
        return answer.result(DRIVER_TIMEOUT_S)
    except TimeoutError:
        text = f"The NVIDIA driver did not answer within {DRIVER_TIMEOUT_S:g} s."
        raise CommandError(text) from None
