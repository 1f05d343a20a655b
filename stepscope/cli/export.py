"""`stepscope export`: rows of a run in a file for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import add_output, cannot_write, number_type
from stepscope.cli.named_runs import add_run, named_runs
from stepscope.common.metrics import Stream
from stepscope.export.tables import export
from stepscope.store import StoreError

EXAMPLES = (
    "stepscope export RUN --format csv > steps.csv",
    "stepscope export RUN --format parquet --stream devices --output gpu.parquet",
    "stepscope export RUN --format tensorboard --output tb && tensorboard --logdir tb",
)
STREAMS = (*map(str, Stream), "events")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_run(parser)
    parser.add_argument("--format", required=True, choices=("csv", "parquet", "tensorboard"))
    parser.add_argument("--stream", choices=STREAMS, default="steps", help="default: steps")
    add_output(parser, "output file; log directory for tensorboard (default: stdout; csv only)")
    parser.add_argument(
        "--rank",
        type=number_type(0, 10**9, int),
        default=0,
        metavar="N",
        help="rank of a distributed run (default: 0)",
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Export a run; return 0. Raises CommandError and RunError."""
    problem = _problem(options)
    if problem is not None:
        raise CommandError(problem, 2)
    try:
        [info] = named_runs([options.runs], root)
        written = export(info.folder, options.format, options.stream, options.rank, options.output)
    except BrokenPipeError:  # an OSError too, but not of --output
        raise
    except StoreError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise cannot_write(options.output, error) from error
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


def _problem(options: argparse.Namespace) -> str | None:
    """Return why these options cannot be combined, and the fix; None if they can."""
    if options.format in ("parquet", "tensorboard") and options.output is None:
        return f"--output: missing, --format {options.format} needs it. Add --output NAME."
    if options.format == "tensorboard" and options.stream == "events":
        return "--stream: TensorBoard holds numbers only, got events. Use csv or parquet."
    return None
