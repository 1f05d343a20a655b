"""`stepscope export`: rows of a run, or of all runs, in files for other tools."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepscope.cli import CommandError, number_type
from stepscope.common.formatting import printable
from stepscope.common.metrics import Stream
from stepscope.export.tables import export, export_all
from stepscope.recorded_run import open_run
from stepscope.store import StoreError
from stepscope.store.recovery import recover_ended

EXAMPLES = (
    "stepscope export RUN --format csv > steps.csv",
    "stepscope export RUN --format parquet --stream devices --output gpu.parquet",
    "stepscope export --all --format parquet --output exported",
    "stepscope export RUN --format tensorboard --output tb && tensorboard --logdir tb",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    formats, streams = ("csv", "json", "parquet", "tensorboard"), (*map(str, Stream), "events")
    add, rank = parser.add_argument, number_type(0, 10**9, int)
    text = "name of the run folder ('stepscope runs'), or its path"
    add("id", nargs="?", metavar="RUN", help=text)
    add("--all", action="store_true", help="export all runs and ranks into one folder (parquet)")
    add("--format", required=True, choices=formats)
    text = "stream to export (default: steps; with --all, every one)"
    add("--stream", choices=streams, help=text)
    text = (
        "output file; log directory for tensorboard, folder for --all (default: stdout; csv "
        "and json only)"
    )
    add("--output", type=Path, metavar="FILE", help=text)
    add("--rank", type=rank, metavar="N", help="rank of a distributed run (default: 0)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Export a run, or all; return the exit code. Raises CommandError, and RunError."""
    _check_usage(options)
    try:
        if options.all:
            return _export_all(root, options.output, options.stream)
        opened = open_run(options.id, runs=root)
        recover_ended(opened.info())
        stream, rank = options.stream or "steps", options.rank or 0
        written = export(opened.folder, options.format, stream, rank, options.output)
    except BrokenPipeError:  # an OSError too, but not of --output
        raise
    except StoreError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        text = f"--output: cannot be written ({error.strerror or error}), got {options.output}."
        raise CommandError(text) from error
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("pyarrow", "tensorboard"):
            raise
        raise CommandError(
            f"--format {options.format}: needs the package {package}, which is not installed. "
            f"Run 'pip install {package}'."
        ) from error
    if options.output is not None:
        print(written)
    return 0


def _export_all(root: Path, output: Path, stream: str | None) -> int:
    """Export all runs; return 1 if one cannot be read. Raises the errors of `export_all`."""
    streams = (*map(str, Stream), "events") if stream is None else (stream,)
    unread = dict.fromkeys(export_all(root, output, streams))  # a store is read for each stream
    for problem in unread:
        print(printable(problem), file=sys.stderr)
    print(f"The runs of {root} were written to {output}.")
    return int(bool(unread))


def _check_usage(options: argparse.Namespace) -> None:
    text = None
    if options.all == (options.id is not None):
        got = "both" if options.all else "neither"
        text = f"export: needs a run or --all, got {got}. List the runs with 'stepscope runs'."
    elif options.all and (options.format != "parquet" or options.rank is not None):
        text = "--all: exports every rank as parquet. Use --format parquet without --rank."
    elif options.format in ("parquet", "tensorboard") and options.output is None:
        what = "a file" if options.format == "parquet" else "a log directory"
        what = "a folder" if options.all else what
        text = f"--output: --format {options.format} needs {what}, got none. Add --output NAME."
    elif options.format == "tensorboard" and options.stream == "events":
        text = "--stream: TensorBoard holds numbers only, got events. Use csv, json or parquet."
    if text is not None:
        raise CommandError(text, 2)
