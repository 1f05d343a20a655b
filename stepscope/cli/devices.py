"""`stepscope devices`: every GPU of this machine in a terminal, once or again and again."""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.cli.device_table import brief, table
from stepscope.gpu.as_json import machine_json
from stepscope.gpu.machine_monitor import Machine
from stepscope.gpu.machine_state import MachineView
from stepscope.gpu.source import open_source

EXAMPLES = (
    "stepscope devices",
    "stepscope devices --watch             again every second, until Ctrl-C",
    "stepscope devices --watch 5 --json    one JSON object a line",
    "stepscope devices --json | jq '.devices[].health'",
)

FIRST_WAIT_S = 0.3
"""Pause between the first two looks: shares of processes and activity take two readings."""
SILENT_S = 15.0
"""A broken GPU can block a call of the driver for ever; so long is waited for an answer."""
END_S = 1.0
SHORTEST_S, LONGEST_S = 0.2, 3600.0

HOME, CLEAR, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="show it again every SECONDS (default: 1), until Ctrl-C",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object; with --watch one a line"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Show the devices; return the exit code. Ctrl-C raises KeyboardInterrupt."""
    return show(Machine(open_source), watch_s=options.watch, as_json=options.json)


def show(
    machine: Machine,
    *,
    watch_s: float | None = None,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Look once, or every `watch_s` seconds, and print; return the exit code.

    1 means that the driver does not answer.
    """
    looker = _Looker(machine)
    try:
        view = looker.look()
        if view is not None:
            sleep(FIRST_WAIT_S)
            view = looker.look()
        write = _writer(watch_s is not None, as_json)
        while view is not None:
            write(view)
            if watch_s is None:
                return 0
            sleep(watch_s)
            view = looker.look()
    finally:
        looker.close()
    print(f"The NVIDIA driver did not answer within {SILENT_S:g} s.", file=sys.stderr)
    return 1


def _writer(again: bool, as_json: bool) -> Callable[[MachineView], None]:
    """Return what prints a view: as JSON, over the one before on a terminal, or below it."""
    if as_json:
        indent = None if again else 1
        return lambda view: print(json.dumps(machine_json(view), indent=indent), flush=True)
    if again and sys.stdout.isatty():
        print(CLEAR, end="")
        return lambda view: print(in_place(view), end="", flush=True)
    end = "\n\n" if again else "\n"
    return lambda view: print("\n".join(table(view, _columns())), end=end, flush=True)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def in_place(view: MachineView) -> str:
    """Return what draws over the picture before; no line is empty in between.

    Where the blocks of all GPUs are too long for the terminal, each GPU has a line.
    """
    size = shutil.get_terminal_size()
    lines = table(view, size.columns)
    if len(lines) >= size.lines:
        note = "A larger window, or --json, shows all of it."
        room = max(0, size.lines - 2)
        lines = [*brief(view, size.columns)[:room], note[: size.columns]]
    return HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW


class _Looker:
    """Looks in a thread of its own, which may be left behind in a call of the driver."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._thread = threading.Thread(target=self._serve, name="stepscope-look", daemon=True)
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[MachineView | Exception] = queue.SimpleQueue()
        self._thread.start()

    def look(self) -> MachineView | None:
        """Return the machine as it is now; None where the driver does not answer."""
        self._asked.put(True)
        try:
            answer = self._answers.get(timeout=SILENT_S)
        except queue.Empty:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the thread, if the driver lets it."""
        self._asked.put(False)
        self._thread.join(END_S)

    def _serve(self) -> None:
        self._machine.arm(True)
        while self._asked.get():
            try:
                self._answers.put(self._machine.look())
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
                self._answers.put(error)
        self._machine.arm(False)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text}.") from None
    if not SHORTEST_S <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"must be {SHORTEST_S:g} to {LONGEST_S:g} s, got {text}. 1 is the default."
        )
    return value
