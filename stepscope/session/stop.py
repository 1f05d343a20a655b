"""Stop a user's script by signals: SIGINT, SIGTERM, SIGKILL.

The first Stop acts as Ctrl-C at the next step boundary (in a job, at the same step of all ranks),
or after GRACE_S. Each further Stop sends the next signal at once. The run folder records a signal
before it is sent. If a hung GPU call keeps the GIL, the page's process calls `kill_unresponsive`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

from stepscope.common.files import read_json
from stepscope.distributed.rendezvous import RESTARTS
from stepscope.host.child_process import signal_all
from stepscope.run import (
    STALE_S,
    RunInfo,
    RunKind,
    RunStatus,
    is_own,
    own_ranks,
    pid_namespace,
    process_of,
    rank_json,
)
from stepscope.run.folder import not_signaled, recorder_of
from stepscope.run.rank_info import BYTES_LIMIT, RankInfo
from stepscope.store import store_name
from stepscope.store.recorder import Command, CommandName, Recorder
from stepscope.store.recovery import note_end

TERM_S = 5.0  # Time between SIGTERM and SIGKILL.
KILL_S = 2.0  # Maximum wait for the exit of a killed process, which may be blocked in a driver.
LAUNCHERS = {
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
}
"""Programs and modules that start the ranks and exit with them."""
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
    left, used = environ.get(MAX_RESTARTS, ""), environ.get(RESTARTS, "")
    if not (left.isdecimal() and used.isdecimal() and int(left) > int(used)):
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
        here = rank.run_json.get("pid_namespace") == pid_namespace()
        if here and process is not None and process.pid != os.getpid():
            yield rank, process


def _launcher(rank: psutil.Process) -> psutil.Process | None:
    """Return the parent of a rank if the parent is a launcher of the same user."""
    with contextlib.suppress(psutil.Error):
        parent = rank.parent()
        if parent is not None and parent.uids().real == rank.uids().real:
            return parent if starts_ranks(" ".join(parent.cmdline())) else None
    return None


def starts_ranks(command: str) -> bool:
    """Return True if the program of a command line, not one of its arguments, is a launcher."""
    program, *arguments = command.split() or [""]
    if not os.path.basename(program).startswith("python"):
        return os.path.basename(program) in LAUNCHERS
    arguments = list(itertools.dropwhile("-u".__eq__, arguments))
    started = arguments[1:2] if arguments[:1] == ["-m"] else arguments[:1]
    return any(os.path.basename(name) in LAUNCHERS for name in started)


GRACE_S, JOB_GRACE_S = 5.0, 30.0
"""Maximum wait for a step boundary, for one process and for a job. A rank that is interrupted
within a step leaves the other ranks waiting in a collective."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
REASON = "Stopped from the page."
WRITTEN_S = 2.0
"""Maximum wait for run.json to be written; on a full disk the signal is sent without it."""


class StopEscalator:
    """Sends the signals to this process."""

    def __init__(self, recorder: Recorder, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._recorder = recorder
        self._lock = threading.Lock()
        self._waiting: list[Command] = []
        self._sent = 0
        self.asked = False  # True once a signal was sent that the script does not ignore.
        self._closed = False
        self._grace = threading.Timer(0.0, lambda: None)

    def on_command(self, command: Command) -> None:
        """Start the grace period, or escalate, if a STOP arrives. Writer thread only."""
        if command.name is not CommandName.STOP:
            return
        with self._lock:
            first = not self._waiting and not self._sent
            self._waiting.append(command)
            which = self._sent
        timer = self._send_later(self.grace_s if first else 0.0, command, which)
        self._grace = timer if first else self._grace

    def at_boundary(self, command: Command) -> None:
        """Act as Ctrl-C. Training thread only. Raises what the script's handler raises."""
        if command in self._waiting:  # else the grace period ended before this boundary
            self._grace.cancel()
            self._send(command, 0)

    def without_boundary(self, command: Command) -> bool:
        """Send SIGINT now for a STOP without a common step boundary; return False if no STOP."""
        if command in self._waiting:
            self._grace.cancel()
            self._send_later(0.0, command, 0)
        return command.name is CommandName.STOP

    def _send_later(self, delay_s: float, command: Command, which: int) -> threading.Timer:
        # A separate thread, because the writer thread has to write the reason meanwhile.
        timer = threading.Timer(delay_s, self._send, (command, which))
        timer.name, timer.daemon = "stepscope-stop", True
        timer.start()
        return timer

    def close(self) -> None:
        """Send no further signal."""
        with self._lock:
            self._closed = True
        self._grace.cancel()

    def _send(self, command: Command, which: int) -> None:
        with self._lock:
            if self._closed:
                return
            late = which != self._sent  # a boundary, or a second Stop, was first
            answered = [one for one in self._waiting if not late or one is command]
            self._waiting = [one for one in self._waiting if one not in answered]
            if not late:
                self._sent = min(which + 1, len(SIGNALS) - 1)
        number = SIGNALS[which]
        self.asked = self.asked or not _ignored(number)
        text = _text(number, self._recorder.step)
        for one in answered:
            self._recorder.finish(one, text, signal=number.name)
        if not late:
            self._announce(number)
            if self._closed:  # during the announcement
                return
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(number)
            else:
                os.kill(os.getpid(), number)

    def _announce(self, number: signal.Signals) -> None:
        """Write the reason, and the final status if the signal certainly ends the process."""
        recorder = self._recorder
        if number is signal.SIGKILL or signal.getsignal(number) is signal.SIG_DFL:
            reason = f"Stopped from the page ({number.name})."
            recorder.set_status(RunStatus.STOPPED, reason)
        else:
            continues = "ignores it and continues" if _ignored(number) else "continues"
            reason = f"Stop requested: {number.name} sent; the script {continues}."
            recorder.describe(reason=reason)
        file, until = recorder.folder / rank_json(recorder.number), time.monotonic() + WRITTEN_S
        while time.monotonic() < until:  # the writer writes events first, then run.json
            with contextlib.suppress(OSError, ValueError, KeyError):
                run_json = read_json(file, BYTES_LIMIT, follow_links=True)
                if run_json["reason"] == reason:
                    return
            time.sleep(0.01)


def kill_unresponsive(run: RunInfo) -> str | None:
    """End a script, or a job's ranks, with a stale heartbeat; return a message. Takes up to 7 s.

    Returns None, and does nothing, unless the process is a script of this host and user. A built-in
    training is never ended: its process may be the server.
    """
    run_json = run.run_json
    is_script = run_json.get("kind") in (RunKind.WATCH, RunKind.INIT)
    here = run_json.get("pid_namespace") == pid_namespace() and is_own(run)
    if not (is_script and run.status.live and here) or run_json["pid"] == os.getpid():
        return None
    if run.heartbeat_age_s < STALE_S or process_of(run_json) is None:
        return None
    return end_job(run)


def _ignored(number: signal.Signals) -> bool:
    return number is not signal.SIGKILL and signal.getsignal(number) is signal.SIG_IGN


def _text(number: signal.Signals, step: int) -> str:
    how = " as Ctrl-C does" if number is signal.SIGINT else ""
    text = f"Stop: after step {step}, {number.name} sent to the script{how}"
    if number is signal.SIGKILL:
        return text
    ignored = ", which ignores it" if _ignored(number) else ""
    return f"{text}{ignored}; if it continues, press Stop again"


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
