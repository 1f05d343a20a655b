"""The console command `stepscope`: one subcommand a task, each imported only when it is asked for.

Exit codes: 0 done, 1 something failed or does not work, 2 wrong usage or an unknown run.
`docs/cli.md` describes every command and option; a test holds the two together.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from stepscope import __version__
from stepscope.run import RunError

BROKEN_PIPE = 141
"""What a shell reports of a command ended by SIGPIPE, as in `stepscope runs | head -1`."""

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["watch"]:
        # Not through argparse: whatever follows belongs to the watched script.
        return int(importlib.import_module("stepscope.watch.main").main(argv[1:]) or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no name may break a listing
    options = parser().parse_args(argv)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end: give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def runs_root() -> Path:
    """Return the folder that holds the run folders."""
    return Path(os.environ.get("STEPSCOPE_RUNS") or "runs")


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    root = argparse.ArgumentParser(
        prog="stepscope",
        description="Record, list, export and look at training runs. Run folders live under "
        "STEPSCOPE_RUNS (runs/ by default); RUN is the name of such a folder.",
        epilog="'stepscope COMMAND --help' shows a command's options and examples.",
    )
    root.add_argument("--version", action="version", version=f"stepscope {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    commands.add_parser("watch", help="run a training script unchanged and record it")
    for add in (_add_record, _add_runs, _add_export, _add_doctor, _add_ui):
        add(commands)
    return root


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add(commands: Commands, name: str, help: str, *examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_record(commands: Commands) -> None:
    found = _add(
        commands,
        "record",
        "record this machine's GPUs and host, without any training",
        "stepscope record                       until Ctrl-C",
        "stepscope record --seconds 60 --name before-upgrade",
        "stepscope record --period 1            once a second: a tenth of the disk space",
        "stepscope record --host --seconds 10   a machine without a GPU",
    )
    found.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="end after N seconds (default: at Ctrl-C or SIGTERM)",
    )
    found.add_argument("--name", default="record", help="name of the run (default: record)")
    found.add_argument(
        "--period",
        type=_period,
        default=0.1,
        metavar="S",
        help="seconds between samples, 0.01 to 60 (default: 0.1)",
    )
    found.add_argument("--host", action="store_true", help="the host alone, no GPU")
    found.set_defaults(run=_record)


def _add_runs(commands: Commands) -> None:
    found = _add(
        commands,
        "runs",
        "list recorded runs, live ones first, then newest first",
        "stepscope runs",
        "stepscope runs --json | jq '.[0].id'",
    )
    found.add_argument("--json", action="store_true", help="a JSON array with more fields")
    found.set_defaults(run=_runs)


def _add_export(commands: Commands) -> None:
    found = _add(
        commands,
        "export",
        "write a run's values as csv, json, parquet or TensorBoard event files",
        "stepscope export RUN --format csv > steps.csv",
        "stepscope export RUN --format parquet --stream devices --output gpu.parquet",
        "stepscope export RUN --format tensorboard --output tb && tensorboard --logdir tb",
    )
    found.add_argument("id", metavar="RUN", help="name of the run folder ('stepscope runs')")
    found.add_argument("--format", required=True, choices=("csv", "json", "parquet", "tensorboard"))
    found.add_argument(
        "--stream",
        default="steps",
        choices=("steps", "samples", "devices", "events"),
        help="which rows (default: steps)",
    )
    found.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write, or log directory of tensorboard "
        "(default: standard output, csv and json only)",
    )
    found.add_argument(
        "--rank", type=_rank, default=0, metavar="N", help="rank of a distributed run (default: 0)"
    )
    found.set_defaults(run=_export)


def _add_doctor(commands: Commands) -> None:
    found = _add(
        commands,
        "doctor",
        "say what was found on this machine, what is missing, and why",
        "stepscope doctor",
        "stepscope doctor --json",
    )
    found.add_argument("--json", action="store_true", help="findings and facts as JSON")
    found.set_defaults(run=_doctor)


def _add_ui(commands: Commands) -> None:
    found = _add(
        commands,
        "ui",
        "open the dashboard on this machine's runs",
        "stepscope ui",
        "stepscope ui -- --server.port 8600 --server.headless true",
    )
    found.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENT", help="arguments for 'streamlit run'"
    )
    found.set_defaults(run=_ui)


# --- the commands; each loads its own modules, so that `--version` and `runs` start in 0.1 s ---


def _record(options: argparse.Namespace) -> int:
    from stepscope.cli.record import record

    return record(
        runs_root(),
        name=options.name,
        seconds=options.seconds,
        period_s=options.period,
        host_alone=options.host,
    )


def _runs(options: argparse.Namespace) -> int:
    from stepscope.cli.runs import print_runs

    return print_runs(runs_root(), as_json=options.json)


def _export(options: argparse.Namespace) -> int:
    from stepscope.export.tables import Wanted, export

    wanted = Wanted(options.format, options.stream, options.rank)
    return export(runs_root(), options.id, wanted, options.output)


def _doctor(options: argparse.Namespace) -> int:
    from stepscope.cli.doctor import main as doctor

    return doctor(runs_root(), as_json=options.json)


def _ui(options: argparse.Namespace) -> int:
    from stepscope.cli.ui import open_page

    return open_page(runs_root(), options.arguments)


# --- option values --------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be above 0 s, got {text}. Leave it out to record until Ctrl-C."
        )
    return value


def _period(text: str) -> float:
    value = _number(text)
    if not 0.01 <= value <= 60:
        raise argparse.ArgumentTypeError(f"must be 0.01 to 60 s, got {text}. 0.1 is the default.")
    return value


def _rank(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text}.")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}.") from None
