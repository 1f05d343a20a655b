"""`stepscope record`: a flight recorder of this machine's GPUs and host, without any training.

It writes an ordinary run folder of kind `record`: every page shows it, and `stepscope export` reads
it. At 10 Hz the host takes about 40 MB a day and each GPU 170; with a `period_s` of 1, a tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.recording.recorder import Command, CommandName, Recorder
from stepscope.run import RunKind, RunStatus, new_run_folder
from stepscope.sampling.nvml import DeviceInfo, DeviceSource, open_source
from stepscope.sampling.sampler import Sampler
from stepscope.store import StoreError

POLL_S = 0.2
"""How late a signal is noticed: a lock that is waited for is not given up for one."""
MARK_LENGTH = 200

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


EXAMPLES = (
    "stepscope record                       until Ctrl-C",
    "stepscope record --seconds 60 --name before-upgrade",
    "stepscope record --period 1            once a second: a tenth of the disk space",
    "stepscope record --host --seconds 10   a machine without a GPU",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="end after N seconds (default: at Ctrl-C or SIGTERM)",
    )
    parser.add_argument("--name", default="record", help="name of the run (default: record)")
    parser.add_argument(
        "--period",
        type=_period,
        default=0.1,
        metavar="S",
        help="seconds between samples, 0.01 to 60 (default: 0.1)",
    )
    parser.add_argument("--host", action="store_true", help="the host alone, no GPU")


def run(options: argparse.Namespace, root: Path) -> int:
    """Record; return the exit code."""
    return record(
        root,
        name=options.name,
        seconds=options.seconds,
        period_s=options.period,
        host_alone=options.host,
    )


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}.") from None


@dataclass(slots=True)
class Ended:
    """Why a recording ended; `reason` None while it goes on."""

    status: RunStatus = RunStatus.FINISHED
    reason: str | None = None

    def stop(self, reason: str) -> None:
        """End it by somebody's will; the first reason counts."""
        if self.reason is None:
            self.status, self.reason = RunStatus.STOPPED, reason


def record(
    root: Path,
    *,
    name: str = "record",
    seconds: float | None = None,
    period_s: float = 0.1,
    host_alone: bool = False,
    source: DeviceSource | None = None,
) -> int:
    """Record until `seconds` have passed, a signal, or Stop on the page; return the exit code.

    Without a GPU it says why and makes no run, unless `host_alone` asks for the host's values.
    """
    source = open_source() if source is None else source
    if source.reason is not None and not host_alone:
        print(f"Nothing to record: {source.reason} 'stepscope record --host' records the host.")
        return 0
    devices = [] if host_alone else source.devices()
    try:
        folder = new_run_folder(root, name)
        recorder = Recorder(folder, name=name, kind=RunKind.RECORD)
    except (StoreError, OSError) as error:
        print(f"{root}: cannot hold a run ({error}). Set STEPSCOPE_RUNS.", file=sys.stderr)
        return 1
    _describe(recorder, devices)
    what = f"{len(devices)} GPU{'s' if len(devices) != 1 else ''} and this host"
    until = "until Ctrl-C" if seconds is None else f"for {seconds:g} s; Ctrl-C ends it"
    print(f"Recording {'this host' if host_alone else what} {until}: {folder}", flush=True)
    sampler = Sampler(
        recorder,
        allocator_index=None,
        gpu_uuids=[info.uuid for info in devices],
        source=source,
        period_s=period_s,
    )
    ended = Ended(reason=None)
    with _signals(ended.stop):
        recorder.set_status(RunStatus.RUNNING)
        sampler.start()
        took_s = _serve(recorder, ended, seconds)
        sampler.stop()
        recorder.close(ended.status, ended.reason)
    print(f"{ended.status.capitalize()} after {took_s:.1f} s: {folder.name}")
    return 0


def _serve(recorder: Recorder, ended: Ended, seconds: float | None) -> float:
    """Answer the page until the recording ends; return how long that took."""
    began = time.monotonic()
    while ended.reason is None:
        left_s = POLL_S if seconds is None else began + seconds - time.monotonic()
        if left_s <= 0:
            break
        for command in recorder.wait_command(min(POLL_S, left_s)):
            _answer(recorder, ended, command)
    return time.monotonic() - began


def _answer(recorder: Recorder, ended: Ended, command: Command) -> None:
    if command.name is CommandName.MARK:
        text = str(command.args.get("text", "")).strip()[:MARK_LENGTH]
        recorder.finish(command, text or "Mark")
    elif command.name is CommandName.STOP:
        recorder.finish(command, "Stop")
        ended.stop("Stopped from the page.")
    else:
        recorder.finish(command, f"{command.name}: a recording has no training to act on", ok=False)


@contextlib.contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or lost terminal into `stop`; a second one acts as ever.

    A signal that the caller ignores (nohup) stays ignored.
    """
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if former[number] is not signal.SIG_IGN]

    def handle(number: int, _frame: object) -> None:
        for one in taken:
            signal.signal(one, former[one])
        stop(
            "Stopped by Ctrl-C."
            if number == signal.SIGINT
            else f"Stopped by {signal.Signals(number).name}."
        )

    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, former[number])


def _describe(recorder: Recorder, devices: list[DeviceInfo]) -> None:
    recorder.describe(
        commands=[CommandName.MARK, CommandName.STOP],
        devices=[
            {"uuid": info.uuid, "name": info.name, "memory_total": info.memory_total}
            for info in devices
        ],
        environment=_environment(devices),
    )


def _environment(devices: list[DeviceInfo]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "driver": devices[0].driver_version if devices else None,
        "gpu": ", ".join(dict.fromkeys(info.name for info in devices)) or None,
        "cores": os.cpu_count(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
    }
