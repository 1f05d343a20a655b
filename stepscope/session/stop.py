"""Stop on the page, for a script that we do not control: it is sent signals, each harder.

The first Stop acts as Ctrl-C at the next step boundary, or after GRACE_S if none comes. Each
further Stop sends the next harder signal at once. The run folder says what is about to happen
before the signal is sent, because a killed process can write nothing any more.

In a job of several ranks each rank does so to itself, first at the boundary of the same step
(`stepscope/commands/consensus.py`). Where the ranks do not agree on one, each acts at once.

A thread that waits for a hung GPU may keep the GIL, and then no thread of the script can serve a
Stop. In that case the page's process sends the last signal itself, by `kill_unheard`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil

from stepscope.common.files import read_json
from stepscope.recorder.recorder import Command, Recorder
from stepscope.recorder.recovery import note_end
from stepscope.run import (
    STALE_S,
    RunInfo,
    RunKind,
    RunStatus,
    pid_namespace,
    process_of,
    read_only_reason,
)
from stepscope.run.process import not_signaled, recorder_of, send_signal
from stepscope.run.rank_info import BYTES_LIMIT
from stepscope.session.force import end_job
from stepscope.store import store_name

GRACE_S = 5.0
JOB_GRACE_S = 30.0
"""The same in a job of several ranks. A rank that is interrupted within a step leaves the others
waiting in a collective, so slow steps are given more time."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
REASON = "Stopped from the page."
KILLED_S = 2.0
"""Time that the system may need to end a killed process, unless it waits in a driver."""
WRITTEN_S = 2.0
"""Longest wait for run.json to be written: on a full disk the signal is sent all the same."""


class Stopper:
    """Sends this process the signals; `run_json_file` is the run.json that its recorder writes."""

    def __init__(self, run_json_file: Path, *, grace_s: float = GRACE_S) -> None:
        self._run_json_file = run_json_file
        self._grace_s = grace_s
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
        # A thread of its own: the writer's thread has to write the reason meanwhile.
        delay_s = self._grace_s if first else 0.0
        timer = threading.Timer(delay_s, self._send, (recorder, command, which))
        timer.name, timer.daemon = "stepscope-stop", True
        if first:
            self._grace = timer
        timer.start()

    def at_boundary(self, recorder: Recorder, command: Command) -> None:
        """Act as Ctrl-C, in the training thread; raises what the script's own handler raises."""
        if command in self._waiting:  # else the time was up before this boundary came
            self._end_grace()
            self._send(recorder, command, 0)

    def without_boundary(self, recorder: Recorder, command: Command) -> None:
        """Act now: no boundary will come at which all ranks of a job could act together."""
        if command in self._waiting:
            self._end_grace()
            timer = threading.Timer(0.0, self._send, (recorder, command, 0))
            timer.name, timer.daemon = "stepscope-stop", True
            timer.start()

    def close(self) -> None:
        """Send no signal from now on."""
        with self._lock:
            self._closed = True
        self._end_grace()

    def wait_longer(self, grace_s: float) -> None:
        """Give the script so long for a boundary from now on, as a rank among several needs it."""
        self._grace_s = grace_s

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

    def _written_reason(self) -> str | None:
        """The reason in the run folder: the writer writes events first, then the run_json."""
        try:
            reason = read_json(self._run_json_file, BYTES_LIMIT, follow_links=True)["reason"]
        except (OSError, ValueError):
            return None
        return None if reason is None else str(reason)


def kill_unheard(run: RunInfo) -> str | None:
    """Send SIGKILL to a script that gives no sign of life; return a sentence on what came of it.

    Does nothing, and returns None, unless the heartbeat is stale and the process is a script of
    this host and user. It is sent no signal unless it has the store of this folder open for
    writing. A built-in training is never killed: its process may be the server. Of a job all ranks
    are ended.
    """
    run_json = run.run_json
    silent_s = run.heartbeat_age_s
    certain = run_json.get("pid_namespace") == pid_namespace() and read_only_reason(run) is None
    a_script = (
        run_json.get("kind") in (RunKind.WATCH, RunKind.INIT) and run_json["pid"] != os.getpid()
    )
    if not (run.status.live and certain and a_script) or silent_s < STALE_S:
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
    until = time.monotonic() + KILLED_S
    while process_of(run_json) is not None:
        if time.monotonic() > until:
            return "SIGKILL sent. The process is still there: it waits in a driver, or for a disk."
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
