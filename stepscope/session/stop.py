"""Stop a user's script by signals: SIGINT, SIGTERM, SIGKILL.

The first Stop acts as Ctrl-C at the next step boundary, in a job that of the same step, or after
GRACE_S. Each further Stop sends the next signal at once. The run folder records the signal before
it is sent. If a thread that waits for a hung GPU keeps the GIL, the page's process sends the last
signal, by `kill_unheard`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from stepscope.common.files import read_json
from stepscope.distributed.rendezvous import RESTARTS
from stepscope.gpu.processes import program_of
from stepscope.recorder.recorder import Command, Recorder
from stepscope.recorder.recovery import note_end
from stepscope.run import (
    STALE_S,
    RunInfo,
    RunKind,
    RunStatus,
    pid_namespace,
    process_of,
    rank_json,
    read_only_reason,
    write_run_json,
)
from stepscope.run.folder import not_signaled, recorder_of, send_signal
from stepscope.run.rank_info import (
    BYTES_LIMIT,
    UNREADABLE,
    RankMetadata,
    find_rank,
    now_of,
    rank_numbers,
    read_run_json,
)
from stepscope.store import store_name

log = logging.getLogger(__name__)

TERM_S = 5.0  # time between SIGTERM and SIGKILL
KILL_S = 2.0  # time to wait for the end of a killed process; it may wait in a driver
LAUNCHERS = {
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "trainer.runners.agent",
}
"""Programs and modules that start ranks and end with them."""
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
OTHERS_S = 5.0  # time that the other ranks are given to write their end
FORCED_REASON = "Ended by force from the page: {}."


def end_job(run: RunInfo) -> str:
    """End all ranks of this host; return a sentence on what came of it. Takes up to 7 s."""
    ranks = dict(rank_processes(run))
    refused = " ".join(
        not_signaled(process, run.folder / store_name(rank.number))
        for rank, process in _live_ranks(run)
        if rank.number not in ranks
    )
    if not ranks:
        return f"Force stop: {refused or 'no rank of this run is a process of this host and user.'}"
    # The launcher first: it would start the ranks again, where it may.
    launchers = {parent.pid: parent for parent in map(_launcher, ranks.values()) if parent}
    _signal_all([*launchers.values(), *ranks.values()], signal.SIGTERM)
    _, left = psutil.wait_procs([*ranks.values()], TERM_S)
    _signal_all([*launchers.values(), *left] if left else [], signal.SIGKILL)
    _, stay = psutil.wait_procs(left, KILL_S)
    signals = "SIGTERM" if not left else f"SIGTERM, then SIGKILL to {len(left)} of {len(ranks)}"
    for number in ranks:
        _note(run.folder, number, FORCED_REASON.format(signals))
    if stay:
        still = "it waits" if len(stay) == 1 else "they wait"
        return (
            f"Force stop: SIGKILL sent; {len(stay)} still there: {still} in a driver or for a disk."
        )
    what = "rank has" if len(ranks) == 1 else "ranks have"
    return " ".join(filter(None, (f"Force stop: {len(ranks)} {what} ended ({signals}).", refused)))


def keep_stopped(run: RunInfo, environ: Mapping[str, str]) -> None:
    """End the launcher that would start stopped ranks again, after up to OTHERS_S."""
    left, used = (environ.get(name, "") for name in (MAX_RESTARTS, RESTARTS))
    if not (left.isdecimal() and used.isdecimal() and int(left) > int(used)):
        return
    launcher = _launcher(psutil.Process())
    until = time.monotonic() + OTHERS_S
    while launcher is not None and dict(rank_processes(run)) and time.monotonic() < until:
        time.sleep(0.01)
    _signal_all([launcher] if launcher else [], signal.SIGTERM)


def _signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            send_signal(process, number)


def rank_processes(run: RunInfo) -> Iterator[tuple[int, psutil.Process]]:
    """Yield number and process of each other rank of this host that certainly writes the run."""
    for rank, _ in _live_ranks(run):
        process = recorder_of(rank.run_json, run.folder / store_name(rank.number))
        if process is not None:
            yield rank.number, process


def _live_ranks(run: RunInfo) -> Iterator[tuple[RankMetadata, psutil.Process]]:
    """Yield each other live rank of this host, and the process that its file names."""
    for rank in filter(
        None, (find_rank(run.folder, number) for number in rank_numbers(run.folder))
    ):
        info = RunInfo(run.folder, rank.status, None, rank.age_s, rank.run_json)
        process = process_of(rank.run_json) if _is_ours(info) else None
        if process is not None and process.pid != os.getpid():
            yield rank, process


def _is_ours(run: RunInfo) -> bool:
    """Return True if a live run's process numbers are those of this host, and its user ours."""
    here = run.run_json.get("pid_namespace") == pid_namespace()
    return run.status.live and here and read_only_reason(run) is None


def _launcher(rank: psutil.Process) -> psutil.Process | None:
    """Return the parent of a rank if it is a program that starts ranks, of the same user."""
    with contextlib.suppress(psutil.Error):
        parent = rank.parent()
        if parent is not None and parent.uids().real == rank.uids().real:
            return parent if starts_ranks(" ".join(parent.cmdline())) else None
    return None


def starts_ranks(command: str) -> bool:
    """Return True if a command is a launcher; a shell or an editor may only name one."""
    return program_of(command).rpartition(" ")[2] in LAUNCHERS


def _note(folder: Path, number: int, reason: str) -> None:
    """Write the end of a rank that could not write it itself."""
    try:
        run_json = read_run_json(folder, number)
        if RunStatus(run_json["status"]).live:
            ended = {"status": RunStatus.STOPPED, "reason": reason, "ended": now_of(run_json)}
            write_run_json(folder, run_json | ended, rank_json(number))
    except UNREADABLE as error:
        log.warning("stepscope: %s: rank %d: end not written: %s", folder, number, error)


GRACE_S, JOB_GRACE_S = 5.0, 30.0
"""Longest wait for a boundary, alone and in a job of several ranks: a rank that is interrupted
within a step leaves the others waiting in a collective."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
REASON = "Stopped from the page."
WRITTEN_S = 2.0
"""Longest wait for run.json to be written: on a full disk the signal is sent all the same."""


class StopEscalator:
    """Sends this process the signals; `run_json_file` is the run.json that its recorder writes."""

    def __init__(self, run_json_file: Path, *, grace_s: float = GRACE_S) -> None:
        self._run_json_file = run_json_file
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._waiting: list[Command] = []
        self._sent = 0
        self._acted = False
        self._closed = False
        self._grace: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """True once a signal was sent that the script does not ignore: the run was stopped."""
        return self._acted

    def heard(self, recorder: Recorder, command: Command) -> None:
        """Take a STOP as it arrives, in a thread of ours."""
        with self._lock:
            first = not self._waiting and not self._sent
            self._waiting.append(command)
            which = self._sent
        timer = self._send_later(self.grace_s if first else 0.0, recorder, command, which)
        self._grace = timer if first else self._grace

    def at_boundary(self, recorder: Recorder, command: Command) -> None:
        """Act as Ctrl-C, in the training thread; raises what the script's own handler raises."""
        if command in self._waiting:  # else the time was up before this boundary came
            self._end_grace()
            self._send(recorder, command, 0)

    def without_boundary(self, recorder: Recorder, command: Command) -> None:
        """Act now: no boundary will come at which all ranks of a job could act together."""
        if command in self._waiting:
            self._end_grace()
            self._send_later(0.0, recorder, command, 0)

    def _send_later(
        self, delay_s: float, recorder: Recorder, command: Command, which: int
    ) -> threading.Timer:
        # A thread of its own: the writer's thread has to write the reason meanwhile.
        timer = threading.Timer(delay_s, self._send, (recorder, command, which))
        timer.name, timer.daemon = "stepscope-stop", True
        timer.start()
        return timer

    def close(self) -> None:
        """Send no signal from now on."""
        with self._lock:
            self._closed = True
        self._end_grace()

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _send(self, recorder: Recorder, command: Command, which: int) -> None:
        with self._lock:
            if self._closed:
                return  # the run is over, and what the script does now is its own
            late = which != self._sent  # a boundary, or an impatient second click, was first
            answered = [one for one in self._waiting if not late or one is command]
            self._waiting = [one for one in self._waiting if one not in answered]
            if not late:
                self._sent = min(which + 1, len(SIGNALS) - 1)
        number = SIGNALS[which]
        self._acted = self._acted or not _ignored(number)
        text = _text(number, recorder.step)
        for one in answered:
            recorder.finish(one, text, signal=number.name)
        if not late:
            self._announce(recorder, number)
            if self._closed:
                return  # while it was being announced
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(number)
            else:
                os.kill(os.getpid(), number)

    def _announce(self, recorder: Recorder, number: signal.Signals) -> None:
        """Write what was asked, and the final status if the signal surely ends the process."""
        if number is signal.SIGKILL or signal.getsignal(number) is signal.SIG_DFL:
            reason = f"Stopped from the page ({number.name})."
            recorder.set_status(RunStatus.STOPPED, reason)
        else:
            goes_on = "ignores it and goes on" if _ignored(number) else "goes on"
            reason = f"Stop asked: {number.name} sent; the script {goes_on}."
            recorder.describe(reason=reason)
        until = time.monotonic() + WRITTEN_S
        while time.monotonic() < until and self._written_reason() != reason:
            time.sleep(0.01)

    def _written_reason(self) -> Any:
        """Return the reason in the run folder: the writer writes events first, then run.json."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return read_json(self._run_json_file, BYTES_LIMIT, follow_links=True)["reason"]
        return None


def kill_unheard(run: RunInfo) -> str | None:
    """Send SIGKILL to a script, or all ranks of a job, without a sign of life; return a sentence.

    Does nothing, and returns None, unless the heartbeat is stale and the process is a script of
    this host and user that has the store open for writing. A built-in training is never killed: its
    process may be the server.
    """
    run_json = run.run_json
    silent_s = run.heartbeat_age_s
    a_script = run_json.get("kind") in (RunKind.WATCH, RunKind.INIT)
    if not (a_script and _is_ours(run)) or run_json["pid"] == os.getpid() or silent_s < STALE_S:
        return None
    if run_json.get("world_size", 1) != 1:
        return end_job(run)
    store = run.folder / store_name(0)
    named, process = process_of(run_json), recorder_of(run_json, store)
    if process is None:
        return None if named is None else f"Stop: {not_signaled(named, store)}"
    try:
        send_signal(process, signal.SIGKILL)
    except (psutil.Error, OSError) as error:
        return f"SIGKILL could not be sent: {error}."
    until = time.monotonic() + KILL_S
    while process_of(run_json) is not None:
        if time.monotonic() > until:
            still = "it is stuck in a driver or on a disk."
            return f"SIGKILL sent, but the process is still there: {still}"
        time.sleep(0.01)
    reason = f"Stopped from the page (SIGKILL): it had not answered for {silent_s:.0f} s."
    note_end(run.folder, RunStatus.STOPPED, reason)
    return reason


def _ignored(number: signal.Signals) -> bool:
    return number is not signal.SIGKILL and signal.getsignal(number) is signal.SIG_IGN


def _text(number: signal.Signals, step: int) -> str:
    how = " as Ctrl-C does" if number is signal.SIGINT else ""
    text = f"Stop: after step {step}, {number.name} sent to the script{how}"
    if number is signal.SIGKILL:
        return text
    if _ignored(number):
        text += ", which ignores it"
    return f"{text}; if it goes on, press Stop again"


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Delay signals that Python code handles, but Ctrl-C, to the end; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: dict[int, None] = {}

    def keep(number: int, _: FrameType | None) -> None:
        kept[number] = None

    former = {
        number: handler
        for number in signal.valid_signals() - {signal.SIGINT}
        if callable(handler := signal.getsignal(number))
    }
    for number in former:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for one in kept:
            signal.raise_signal(one)
