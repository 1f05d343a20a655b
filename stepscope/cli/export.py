"""`stepscope export`: a run's rows as CSV, JSON, Parquet or TensorBoard events."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepscope.cli import number_type
from stepscope.export.tables import ExportRequest, export
from stepscope.metrics import Stream
from stepscope.recorder.recovery import recover_ended
from stepscope.run import read_run, run_folder
from stepscope.store import StoreError

EXAMPLES = (
    "stepscope export RUN --format csv > steps.csv",
    "stepscope export RUN --format parquet --stream devices --output gpu.parquet",
    "stepscope export RUN --format tensorboard --output tb && tensorboard --logdir tb",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    formats, streams = ("csv", "json", "parquet", "tensorboard"), (*map(str, Stream), "events")
    parser.add_argument("id", metavar="RUN", help="name of the run folder ('stepscope runs')")
    parser.add_argument("--format", required=True, choices=formats)
    parser.add_argument(
        "--stream", default="steps", choices=streams, help="stream to export (default: steps)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="output file, or log directory for tensorboard (default: stdout; csv and json only)",
    )
    parser.add_argument(
        "--rank",
        type=number_type(0, 10**9, int),
        default=0,
        metavar="N",
        help="rank of a distributed run (default: 0)",
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Export a run; return the exit code. Raises RunError for an unknown run."""
    folder = run_folder(root, options.id)
    problem = _usage_problem(options)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    recover_ended(read_run(folder))
    try:
        request = ExportRequest(options.format, options.stream, options.rank)
        written = export(folder, request, options.output)
    except BrokenPipeError:  # an OSError too, but not of --output
        raise
    except StoreError as error:
        problem = str(error)
    except OSError as error:
        reason = error.strerror or error
        problem = f"--output: cannot be written ({reason}), got {options.output}."
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("pyarrow", "tensorboard"):
            raise
        problem = (
            f"--format {options.format}: needs the package {package}, which is not installed. "
            f"Run 'pip install {package}'."
        )
    else:
        if options.output is not None:
            print(written)
        return 0
    print(problem, file=sys.stderr)
    return 1


def _usage_problem(options: argparse.Namespace) -> str | None:
    if options.format in ("parquet", "tensorboard") and options.output is None:
        what = "a file" if options.format == "parquet" else "a log directory"
        return f"--output: --format {options.format} needs {what}, got none. Add --output NAME."
    if options.format == "tensorboard" and options.stream == "events":
        return "--stream: TensorBoard holds numbers only, got events. Use csv, json or parquet."
    return None
