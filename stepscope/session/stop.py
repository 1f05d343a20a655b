"""Stop a user's script: by SIGINT from within, or by force from the page's process.

Stop acts as Ctrl-C at the next step boundary (in a job, at the same step of all ranks), or after
GRACE_S; a further Stop acts at once. The run folder records the signal before it is sent. If the
script continues, or hangs, the page's process ends it by `end_job`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

from stepscope.host.child_process import signal_all
from stepscope.run import (
    RunInfo,
    RunStatus,
    own_ranks,
    process_of,
)
from stepscope.run.folder import not_signaled, recorder_of
from stepscope.run.rank_info import RankInfo
from stepscope.store import store_name
from stepscope.store.recorder import Command, CommandName, Recorder
from stepscope.store.writer import note_end

TERM_S = 5.0  # Time between SIGTERM and SIGKILL.
KILL_S = 2.0  # Maximum wait for the exit of a killed process, which may be blocked in a driver.
LAUNCHER = re.compile(r"torchrun|torch\.distributed\.(run|launch)|accelerate")
"""In the command line of a program that starts the ranks and exits with them."""
LAUNCH_ID = "TORCHELASTIC_RUN_ID"  # Such a program sets it for each rank.
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
OTHERS_S = 5.0  # Maximum wait for the other ranks to write their exit.


def end_job(run: RunInfo) -> str:
    """Terminate all processes of a run on this host; return the result. Takes up to 7 s."""
    ranks = dict(rank_processes(run))
    refused = " ".join(
        not_signaled(process, run.folder / store_name(rank.number))
        for rank, process in _live_ranks(run)
        if rank.number not in ranks
    )
    if not ranks:
        return f"Force stop: {refused or 'this run has no process of this host and user.'}"
    # The launcher first: it may restart the ranks.
    launchers = {parent.pid: parent for parent in map(_launcher, ranks.values()) if parent}
    signal_all([*launchers.values(), *ranks.values()], signal.SIGTERM)
    _, left = psutil.wait_procs([*ranks.values()], TERM_S)
    signal_all([*launchers.values(), *left] if left else [], signal.SIGKILL)
    _, stay = psutil.wait_procs(left, KILL_S)
    signals = "SIGTERM" if not left else f"SIGTERM, then SIGKILL to {len(left)} of {len(ranks)}"
    for number in ranks:
        reason = f"Ended by force from the page: {signals}."  # a killed rank could not write it
        note_end(run.folder, RunStatus.STOPPED, reason, number=number)
    if stay:
        return f"Force stop: SIGKILL sent; {len(stay)} still blocked in a driver or on a disk."
    what = "process has" if len(ranks) == 1 else "processes have"
    return " ".join(filter(None, (f"Force stop: {len(ranks)} {what} ended ({signals}).", refused)))


def keep_stopped(run: RunInfo, environ: Mapping[str, str]) -> None:
    """Terminate a launcher that would restart the stopped ranks, after at most OTHERS_S."""
    if environ.get(MAX_RESTARTS, "0") == "0":
        return
    launcher = _launcher(psutil.Process())
    until = time.monotonic() + OTHERS_S
    while launcher is not None and dict(rank_processes(run)) and time.monotonic() < until:
        time.sleep(0.01)
    signal_all([launcher] if launcher else [], signal.SIGTERM)


def rank_processes(run: RunInfo) -> Iterator[tuple[int, psutil.Process]]:
    """Yield folder rank and process of each other rank on this host that has its store open."""
    for rank, _ in _live_ranks(run):
        process = recorder_of(rank.run_json, run.folder / store_name(rank.number))
        if process is not None:
            yield rank.number, process


def _live_ranks(run: RunInfo) -> Iterator[tuple[RankInfo, psutil.Process]]:
    """Yield each other live rank in this pid namespace, and the process that its file names."""
    for rank in own_ranks(run):
        process = process_of(rank.run_json)
        if process is not None and process.pid != os.getpid():
            yield rank, process


def _launcher(rank: psutil.Process) -> psutil.Process | None:
    """Return the parent of a rank if it is a launcher, which an orphan's parent is not."""
    with contextlib.suppress(psutil.Error):
        parent = rank.parent()
        if parent is not None and LAUNCH_ID in rank.environ():
            return parent if LAUNCHER.search(" ".join(parent.cmdline())) else None
    return None


GRACE_S = 5.0  # Maximum wait of one process for a step boundary.
JOB_GRACE_S = 30.0
"""That of a job. A rank that is interrupted within a step leaves the others in a collective."""
REASON = "Stopped from the page."


class StopSignal:
    """Sends SIGINT to this process for a Stop."""

    def __init__(self, recorder: Recorder, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.asked = False  # True once a signal was sent that the script does not ignore.
        self._recorder = recorder
        self._lock = threading.Lock()
        self._waiting: list[Command] = []
        self._closed = False
        self._timer = threading.Timer(0.0, lambda: None)

    def on_command(self, command: Command) -> None:
        """Start the grace period if a STOP arrives; a further Stop ends it. Writer thread only."""
        if command.name is CommandName.STOP:
            with self._lock:
                is_first = not self._waiting and not self.asked
                self._waiting.append(command)
            self._send_later(self.grace_s if is_first else 0.0)

    def at_boundary(self, command: Command) -> None:
        """Act as Ctrl-C. Training thread only. Raises what the script's handler raises."""
        if command in self._waiting:  # else the grace period ended before this boundary
            self._send()

    def without_boundary(self, command: Command) -> bool:
        """Send SIGINT now for a STOP without a common step boundary; return False if no STOP."""
        if command in self._waiting:
            self._send_later(0.0)
        return command.name is CommandName.STOP

    def close(self) -> None:
        """Send no further signal."""
        with self._lock:
            self._closed = True
        self._timer.cancel()

    def _send_later(self, delay_s: float) -> None:
        # A separate thread, because the writer thread has to write the reason meanwhile.
        self._timer.cancel()
        self._timer = threading.Timer(delay_s, self._send)
        self._timer.name = "stepscope-stop"
        self._timer.daemon = True
        self._timer.start()

    def _send(self) -> None:
        with self._lock:
            answered, self._waiting = self._waiting, []
            if self._closed or not answered:  # a boundary, or a second Stop, was first
                return
        self._timer.cancel()
        handler = signal.getsignal(signal.SIGINT)
        is_ignored = handler is signal.SIG_IGN
        self.asked = self.asked or not is_ignored
        text = f"Stop: after step {self._recorder.step}, SIGINT sent to the script as Ctrl-C does"
        text += ", which ignores it" if is_ignored else ""
        for one in answered:
            self._recorder.finish(one, f"{text}; if it continues, use Force stop", signal="SIGINT")
        if handler is signal.SIG_DFL:  # it ends the process at once
            self._recorder.close(RunStatus.STOPPED, REASON)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Delay signals with Python handlers, except SIGINT, to the block's end; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: list[int] = []
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    handlers.pop(signal.SIGINT, None)
    for number in handlers:
        signal.signal(number, lambda number, _: kept.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in dict.fromkeys(kept):
            signal.raise_signal(received)
