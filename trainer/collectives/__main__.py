"""`python -m trainer.collectives`: measure collectives on this machine; print a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope.host.child_process import ChildState
from stepscope.lab.command import FAILED, FINISHED, STOPPED, USAGE, print_error
from stepscope.run import runs_root
from trainer.collectives import measurement as collectives


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        measurement = collectives.Measurement(_plan(options), runs_root(options.runs))
    except OSError as error:
        print_error(f"torchrun cannot be started: {error}.")
        return FAILED
    except collectives.PlanError as error:
        print_error(str(error))
        return USAGE
    try:
        measurement.wait()
    except KeyboardInterrupt:
        measurement.stop()
    output = measurement.output()
    as_json = json.dumps(output.answer, indent=1)
    print(as_json if options.json else collectives.terminal_text(output.answer))
    saved = f"Saved as {measurement.saved}" if measurement.saved is not None else None
    for text in filter(None, (saved, output.reason)):
        print_error(text)
    return {ChildState.FINISHED: FINISHED, ChildState.STOPPED: STOPPED}.get(output.state, FAILED)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="stepscope collectives",
        description="Measure all_reduce, all_gather, reduce_scatter, broadcast and all_to_all "
        "between processes on this machine, by size.",
    )
    add = found.add_argument
    add("--backend", choices=("gloo", "nccl"), default="gloo", help="gloo: CPUs, nccl: GPUs")
    add("--ranks", type=int, default=2, help="number of processes (default: 2)")
    sizes = "bytes of the whole array: 1K..64M in steps of 4×, or 1K,1M (default: 1K..16M)"
    add("--sizes", default="1K..16M", help=sizes)
    add("--runs", type=Path, metavar="DIR", help="folder of all runs (default: STEPSCOPE_RUNS)")
    add("--json", action="store_true", help="print the whole result as JSON")
    return found


def _plan(options: argparse.Namespace) -> collectives.CollectivePlan:
    sizes = collectives.parse_sizes(options.sizes)
    plan = collectives.CollectivePlan(backend=options.backend, ranks=options.ranks, sizes=sizes)
    if plan.backend == collectives.NCCL:
        devices = importlib.import_module("trainer.devices")
        gpus = [one for one in devices.list_devices() if one.cuda_index is not None]
        refused = collectives.refusal(plan, len(gpus), devices.cuda_reason())
        if refused is not None:
            raise collectives.PlanError(refused)
    return plan


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
