"""`python -m trainer.collectives`: measure collectives on this machine; print a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope.run import runs_root
from trainer.collectives.measurement import HEADING, Measurement, closing, line
from trainer.collectives.plan import (
    GLOO,
    NCCL,
    OPERATIONS,
    CollectivePlan,
    PlanError,
    parse_sizes,
    refusal,
)
from trainer.lab.options import print_error
from trainer.runners.child_process import ChildState

FINISHED, FAILED, USAGE, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parser().parse_args(arguments)
    try:
        measurement = Measurement(_plan(options), runs_root(options.runs))
    except PlanError as error:
        print_error(str(error))
        return USAGE
    except OSError as error:
        print_error(f"torchrun cannot be started: {error}.")
        return FAILED
    try:
        return _follow(measurement, as_json=options.json)
    except KeyboardInterrupt:
        measurement.stop()
        return STOPPED


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    found = argparse.ArgumentParser(
        prog="python -m trainer.collectives",
        description="Measure all_reduce, all_gather, reduce_scatter, broadcast and all_to_all "
        "between processes on this machine, by size.",
    )
    add = found.add_argument
    add("--backend", choices=(GLOO, NCCL), default=GLOO, help="gloo: CPUs, nccl: GPUs")
    add("--ranks", type=int, default=2, help="number of processes (default: 2)")
    operations = ",".join(OPERATIONS)
    add("--operations", default=operations, metavar="NAMES", help=f"of {operations} (default: all)")
    sizes = "bytes of the whole array: 1K..64M in steps of 4×, or 1K,1M (default: 1K..16M)"
    add("--sizes", default="1K..16M", help=sizes)
    seconds = "time for each size and operation (default: 0.2; old name: --seconds)"
    add("--seconds-per-size", "--seconds", dest="seconds", type=float, default=0.2, help=seconds)
    add("--runs", type=Path, metavar="DIR", help="folder of all runs (default: STEPSCOPE_RUNS)")
    add("--json", action="store_true", help="print the whole result as JSON")
    return found


def _plan(options: argparse.Namespace) -> CollectivePlan:
    plan = CollectivePlan(
        backend=options.backend,
        ranks=options.ranks,
        operations=tuple(filter(None, options.operations.split(","))),
        sizes=parse_sizes(options.sizes),
        seconds=options.seconds,
    )
    if plan.backend == NCCL:
        devices = importlib.import_module("trainer.devices")
        gpus = [one for one in devices.list_devices() if one.cuda_index is not None]
        refused = refusal(plan, len(gpus), devices.cuda_reason())
        if refused is not None:
            raise PlanError(refused)
    return plan


def _follow(measurement: Measurement, *, as_json: bool) -> int:
    shown, ended = 0, False
    if not as_json:
        print(HEADING)
    while not ended:
        ended = measurement.wait(0.2)
        output = measurement.output()
        for row in [] if as_json else output.answer["rows"][shown:]:
            print(line(row), flush=True)
            shown += 1
    lines = [json.dumps(output.answer, indent=1)] if as_json else closing(output.answer)
    print("\n".join(lines))
    saved = f"Saved as {measurement.saved}" if measurement.saved is not None else None
    for text in filter(None, (saved, output.reason)):
        print_error(text)
    return FINISHED if output.state is ChildState.FINISHED else FAILED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
