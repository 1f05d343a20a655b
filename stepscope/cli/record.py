"""`stepscope record`: flight recorder of this host and its GPUs, without any training.

At 10 Hz the host takes about 40 MB a day and each GPU 170 MB; with a `period_s` of 1, a tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import number_type
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.run import RunKind, RunStatus, new_run_folder
from stepscope.run.status import RunOutcome
from stepscope.session.command_server import CommandServer
from stepscope.session.session import Session, listed
from stepscope.store import StoreError
from stepscope.store.recorder import Command, CommandName

POLL_S = 0.2  # Maximum delay of a signal: Python runs its handler only after the wait for a lock.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


EXAMPLES = (
    "stepscope record                       until Ctrl-C",
    "stepscope record --seconds 60 --name before-upgrade",
    "stepscope record --period 1            once a second: a tenth of the disk space",
    "stepscope record --host --seconds 10   a machine without a GPU",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "--seconds",
        type=number_type(0.001, 1e9, float),
        metavar="N",
        help="end after N seconds (default: at Ctrl-C or SIGTERM)",
    )
    parser.add_argument("--name", default="record", help="name of the run (default: record)")
    parser.add_argument(
        "--period",
        type=number_type(0.01, 60, float),
        default=0.1,
        metavar="S",
        help="seconds between samples, 0.01 to 60 (default: 0.1)",
    )
    parser.add_argument("--host", action="store_true", help="record only the host, no GPUs")


def run(options: argparse.Namespace, root: Path) -> int:
    """Record; return the exit code."""
    return record(
        root,
        open_source(),
        name=options.name,
        seconds=options.seconds,
        period_s=options.period,
        host_alone=options.host,
    )


def record(
    root: Path,
    source: DeviceSource,
    *,
    name: str = "record",
    seconds: float | None = None,
    period_s: float = 0.1,
    host_alone: bool = False,
) -> int:
    """Record until `seconds` have passed, a signal, or Stop on the page; return the exit code."""
    if source.reason is not None and not host_alone:
        print(f"Nothing to record: {source.reason} 'stepscope record --host' records the host.")
        return 0
    devices = [] if host_alone else source.devices()
    reasons: list[str] = []  # why the recording was stopped; the first one counts

    def stop(command: Command) -> None:
        session.recorder.finish(command, "Stop")
        reasons.append("Stopped from the page.")

    with _signals(reasons.append):
        try:
            session = Session(new_run_folder(root, name), name=name, kind=RunKind.RECORD)
        except (StoreError, OSError) as error:
            text = f"Cannot create a run in {root} ({error}). Set STEPSCOPE_RUNS."
            raise CommandError(text) from error
        folder = session.recorder.folder
        what = f"{len(devices)} GPU{'s' if len(devices) != 1 else ''} and this host"
        until = "until Ctrl-C" if seconds is None else f"for {seconds:g} s; Ctrl-C ends it"
        print(f"Recording {'this host' if host_alone else what} {until}: {folder}", flush=True)
        names = ", ".join(dict.fromkeys(info.name for info in devices))
        sampler = session.sample(
            source, map(listed, devices), trains_on=names or None, period_s=period_s
        )
        commands = session.answer(sampler, {CommandName.STOP: stop}, training=False)
        session.recorder.set_status(RunStatus.RUNNING)
        took_s = _serve(commands, reasons, seconds)
        outcome = RunOutcome(RunStatus.STOPPED, reasons[0]) if reasons else RunOutcome()
        session.close(outcome.status, outcome.reason)
    print(f"{outcome.status.capitalize()} after {took_s:.1f} s: {folder.name}")
    return 0


def _serve(commands: CommandServer, reasons: list[str], seconds: float | None) -> float:
    """Execute the page's commands until the recording ends; return its duration."""
    began = time.monotonic()
    while not reasons:
        left_s = POLL_S if seconds is None else began + seconds - time.monotonic()
        if left_s <= 0:
            break
        commands.wait(min(POLL_S, left_s))
    return time.monotonic() - began


@contextlib.contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT, SIGTERM or SIGHUP that is not ignored, as by nohup."""
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if former[number] is not signal.SIG_IGN]

    def handle(number: int, _frame: object) -> None:
        for other in taken:  # so a second signal has its usual effect
            signal.signal(other, former[other])
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        stop(f"Stopped by {name}.")

    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, former[number])
