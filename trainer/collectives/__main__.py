"""`python -m trainer.collectives`: measure collectives here, and print a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope.common.formatting import printable
from stepscope.run import runs_root
from trainer.collectives.plan import (
    BACKENDS,
    GLOO,
    NCCL,
    OPERATIONS,
    Plan,
    PlanError,
    parse_sizes,
    refusal,
)
from trainer.collectives.process import Measurement
from trainer.collectives.table import closing, heading, line
from trainer.runners.child_process import ChildState

FINISHED, FAILED, USAGE, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parser().parse_args(arguments)
    try:
        plan = _plan(options)
    except PlanError as error:
        _say(str(error))
        return USAGE
    try:
        measurement = Measurement(plan, runs_root(options.runs))
    except OSError as error:
        _say(f"torchrun cannot be started: {error}.")
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
        "between the processes of this machine, by size.",
    )
    found.add_argument("--backend", choices=BACKENDS, default=GLOO, help="gloo: CPUs, nccl: GPUs")
    found.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    found.add_argument(
        "--operations",
        default=",".join(OPERATIONS),
        metavar="NAMES",
        help=f"of {','.join(OPERATIONS)} (default: all)",
    )
    found.add_argument(
        "--sizes",
        default="1K..16M",
        help="total bytes: 1K..64M in steps of ×4, or a list such as 1K,1M (default: 1K..16M)",
    )
    found.add_argument("--seconds", type=float, default=0.2, help="seconds per size (default: 0.2)")
    found.add_argument(
        "--runs", type=Path, metavar="DIR", help="folder of all runs (default: STEPSCOPE_RUNS)"
    )
    found.add_argument("--json", action="store_true", help="print the whole result as JSON")
    return found


def _plan(options: argparse.Namespace) -> Plan:
    plan = Plan(
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
    shown = 0
    if not as_json:
        print(heading())
    while True:
        ended = measurement.wait(0.2)
        output = measurement.output()
        for row in [] if as_json else output.document["rows"][shown:]:
            print(line(row), flush=True)
            shown += 1
        if ended:
            break
    if as_json:
        print(json.dumps(output.document, indent=1))
    else:
        print("\n".join(closing(output.document)))
    if output.name is not None:
        _say(f"kept as {output.name}")
    if output.reason is not None:
        _say(output.reason)
    return FINISHED if output.state is ChildState.FINISHED else FAILED


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
