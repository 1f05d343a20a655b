"""The commands of one rank of a job, served by all ranks at the same step (`consensus.py`).

A thread of its own sleeps until a file of the agreement is replaced. Neither a training thread in a
collective nor a writer that waits for the disk holds it up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.commands.command import Command, CommandName, combined
from stepscope.commands.consensus import (
    ANSWER_S,
    KEPT,
    ConsensusFiles,
    Coordinator,
    Participant,
    Proposal,
    ProposalState,
    RankReport,
)
from stepscope.common.clock import clock
from stepscope.common.files import REPLACED, WakeableSleep, is_network_filesystem
from stepscope.common.json_values import first_line
from stepscope.run import RunStatus, process_of
from stepscope.run.rank_info import find_rank
from stepscope.store import StoreError
from stepscope.store.blocks import CommandResult, Event
from stepscope.store.reader import send_command

if TYPE_CHECKING:
    from stepscope.recorder.recorder import Recorder

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Interval of reading while a command is under way, or if changes of a file are not reported."""
IDLE_S = 3600.0
NETWORK_ANSWER_S = 30.0
"""Longest wait for an answer over a network disk, which shows a change some seconds later."""
STOPS_S = 2.0  # Interval of looking over a network disk whether a rank wants all to stop.
LATE_S = 2.0
"""Age of a decision from which run.json lists the ranks that have not reached its step."""
RESULTS_S = 2.0  # Time for which number 0's event waits for the results of the others.
_DISK = "the disk refuses the files of the agreement"


@dataclass(slots=True)
class _Decided:
    """A decided command that number 0 follows."""

    notice: Proposal
    since_s: float
    since: float  # The same moment in epoch seconds.
    ended_s: float | None = None  # When this rank had its own result.
    reported: bool = False


class JobCommands(Participant):
    """The commands of rank `number` of the `ranks` that share a run folder, numbered from 0.

    `on_command` is called with a command when it is proposed. `on_withdrawn` returns whether the
    run serves by itself one on which the ranks did not agree. Raises OSError.
    """

    def __init__(
        self,
        recorder: Recorder,
        number: int,
        ranks: int,
        *,
        lead: int,
        on_command: Callable[[Command], None],
    ) -> None:
        self.on_withdrawn: Callable[[Command], bool] = lambda _command: False
        self._recorder = recorder
        self._on_command = on_command
        self._number = number
        self._ranks = ranks
        self._files = ConsensusFiles(recorder.folder)
        # Where others replace what this rank reads.
        watched = self._files.notices_path.parent if number else self._files.reports_folder
        network = is_network_filesystem(watched)
        answer_s = NETWORK_ANSWER_S if network else ANSWER_S
        super().__init__(
            lambda: recorder.step, lead=lead, flag=recorder.want_boundary, answer_s=answer_s
        )
        self._leader = Coordinator(answer_s=answer_s, silent=self._silence)
        self._report = RankReport()
        self._written = b""
        self._decisions: dict[int, _Decided] = {}
        self._described: Mapping[str, Any] | None = None
        self._kept_events: dict[int, tuple[CommandResult, Event]] = {}
        self._events_lock = threading.RLock()  # a signal handler may come in the middle
        self._answered: deque[int] = deque(maxlen=KEPT)
        self._stop_asked = self._stop_passed_on = False
        self._stops_due_s = 0.0
        self._came = threading.Event()
        self._closing = False
        self._failed = False
        self._sleeper = WakeableSleep(watched, REPLACED)
        self._hears = self._sleeper.sees_touches and not network
        self._wake = self._sleeper.wake
        self._thread = threading.Thread(target=self._work, name="stepscope-agreement", daemon=True)
        self._thread.start()

    def offer(self, command: Command) -> None:
        """Have all ranks serve a command; on number 0 alone."""
        self._leader.ask(command)
        self._wake()

    def take(self) -> list[Command]:
        """Return what this boundary has to serve; the training stands there until `may_leave`."""
        taken = super().take()
        if taken:
            step = self.step()
            # Only the agreement's thread takes entries out.
            for command in taken:
                self._report.taken.setdefault(command.id, step)
            self._wake()
        return taken

    def wait(self, timeout_s: float) -> list[Command]:
        """Wait for something to serve, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def ended(self, command: Command, ok: bool, ended: CommandResult, event: Event) -> None:
        """Record the result of a command on this rank.

        Number 0's event waits for the results of the other ranks, which it includes.
        """
        self._answered.append(command.id)
        bytes_: dict[str, Any] = {
            key: event.data[key] for key in ("before", "after") if key in event.data
        }
        if self._number == 0 and ok and bytes_:
            with self._events_lock:
                self._kept_events[command.id] = ended, event
        else:
            self._recorder.put_ended(ended, event)
        self._report.results[command.id] = {"ok": ok, **bytes_}
        self._wake()

    def want_stop(self, reason: str) -> None:
        """Report to number 0 that all ranks have to stop; from any thread of another rank."""
        self._report.stop = reason
        self._wake()

    def close(self) -> None:
        """End the agreement, and record what is still to be recorded.

        No rank goes on waiting for this one: number 0 withdraws what is not decided.
        """
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(LATE_S)
        for id_ in list(self._kept_events):
            self._release_event(id_, None)
        if self._number:
            return
        self._leader.propose(time.monotonic())
        unserved = [(f"step {step}", command) for step, command in self.unserved()]
        unserved += [("the ranks agreed", notice.command) for notice in self._leader.open]
        self._leader.withdraw("the run has ended")
        self._try(lambda: self._files.write_notices(self._leader.notices))
        self._recorder.describe(command_waits=None)
        for before, command in unserved:
            if command.id not in self._answered:  # a Stop may have acted without a boundary
                text = f"{command.label}: the run ended before {before}"
                self._recorder.finish(command, text, ok=False)

    def abandon(self) -> None:
        """In a forked child: do not wake the parent's thread."""
        self._wake = lambda: None

    def _work(self) -> None:
        while not self._closing:
            try:
                busy = self._turn()
            except Exception:  # the agreement would end with this thread
                if not self._failed:
                    log.exception("stepscope: the ranks may not agree on a command")
                self._failed = busy = True
            self._sleeper.sleep(LOOK_S if busy or not self._hears else IDLE_S)
            self._sleeper.forget_touches()  # what comes later ends the next sleep
        self._sleeper.close()

    def _turn(self) -> bool:
        """Read the files of others and write the own one; return whether to look again soon."""
        if self._number:
            self._handle(self._files.notices())
        else:
            self._lead()
        self._write_report()
        return bool(self._decisions) or bool(self._number == 0 and self._leader.open)

    def _lead(self) -> None:
        leader, now_s = self._leader, time.monotonic()
        self._pass_stop_on(now_s)
        if leader.propose(now_s) and not self._publish():
            return
        self._handle(leader.notices)
        if leader.open:
            before, paused_at = leader.notices, leader.paused_at
            answers, gone = self._answers()
            if leader.decide(now_s, answers, gone):
                if not self._try(lambda: self._files.write_notices(leader.notices)):
                    # No rank has read the decision, so none may serve it.
                    leader.notices, leader.paused_at = before, paused_at
                    leader.withdraw(_DISK)
                    self._try(lambda: self._files.write_notices(leader.notices))
                self._handle(leader.notices)
        self._follow_decisions(now_s)

    def _pass_stop_on(self, now_s: float) -> None:
        """Send Stop as the page does if another rank wants it, unless it was sent."""
        if self._stop_passed_on or now_s < self._stops_due_s:
            return
        self._stops_due_s = now_s + (0.0 if self._hears else STOPS_S)
        stops = (self._files.report(number).stop for number in range(1, self._ranks))
        reason = next(filter(None, stops), None)
        if reason is None:
            return
        self._stop_passed_on = True
        try:
            if not self._stop_asked:
                send_command(self._recorder.folder, CommandName.STOP, {"reason": reason})
        except StoreError as error:
            log.warning("stepscope: the ranks could not be asked to stop: %s", error)

    def _publish(self) -> bool:
        """Write number 0's notices; if the disk refuses that, withdraw the open ones."""
        if self._try(lambda: self._files.write_notices(self._leader.notices)):
            return True
        self._leader.withdraw(_DISK)
        self._handle(self._leader.notices)
        return False

    def _answers(self) -> tuple[dict[int, dict[int, int]], dict[int, str]]:
        """Return the answers of the ranks that take part, and who is gone without an end."""
        wanted = {notice.command.id for notice in self._leader.open}
        answers, gone = {0: dict(self.answers)}, {}
        for number in range(1, self._ranks):
            given = self._files.report(number).answers
            if not wanted <= given.keys():
                rank = find_rank(self._recorder.folder, number)
                status = None if rank is None else rank.status
                if status in (RunStatus.FINISHED, RunStatus.STOPPED):
                    continue  # its training is over: it has no step to hold at
                if rank is not None and status in (RunStatus.CRASHED, RunStatus.FAILED):
                    end = "is gone" if status is RunStatus.CRASHED else "has failed"
                    gone[number] = f"rank {rank.rank} {end}"
            answers[number] = given
        return answers, gone

    def _silence(self, number: int) -> str:
        rank = find_rank(self._recorder.folder, number)
        if rank is None:
            return f"rank {number} has not started"
        process = process_of(rank.run_json) if rank.age_s > 2 else None
        stopped = process is not None and process.status() == "stopped"
        text = f"rank {rank.rank} has not answered"
        return f"{text} (its process is stopped)" if stopped else text

    def _handle(self, notices: Sequence[Proposal]) -> None:
        for notice in self.hear(notices):
            command = notice.command
            if notice.state is ProposalState.PROPOSED:
                self._announce(command)
            elif notice.state is ProposalState.WITHDRAWN:
                self._withdraw(command, notice.why or "")
            elif self._number == 0:
                self._decisions[command.id] = _Decided(notice, time.monotonic(), clock.now())
            self._came.set()
        for notice in self.late:
            text = "not on this rank: rank 0 decided after this rank had moved on"
            self._recorder.finish(notice.command, f"{notice.command.label}: {text}", ok=False)
        self.late.clear()

    def _announce(self, command: Command) -> None:
        """Announce a command; of a Stop run.json has the time, as it may never be served."""
        if command.name is CommandName.STOP and self._number == 0 and not self._stop_asked:
            self._stop_asked = True
            self._recorder.describe(stop_asked=clock.now())
        try:
            self._on_command(command)
        except Exception:
            log.exception("stepscope: a command could not be announced")

    def _withdraw(self, command: Command, why: str) -> None:
        """Record that no rank serves a command."""
        served_alone = self.on_withdrawn(command)
        if self._number:
            return
        if served_alone:
            text = f"{command.label} cannot run at the same step on all ranks: {why}"
            self._recorder.event(command.name, text, ok=False)
        else:
            text = f"{command.label}: withdrawn on all ranks: {why}"
            self._recorder.finish(command, text, ok=False)

    def _write_report(self) -> None:
        """Replace this rank's file if the report has changed."""
        report = self._report
        for entries in (report.taken, report.results):
            for old in list(entries)[:-KEPT]:
                del entries[old]
        report.answers = dict(self.answers)
        content = msgspec.json.encode(report)
        is_new = bool(self._number) and content != self._written
        if is_new and self._try(lambda: self._files.write_report(self._number, content)):
            self._written = content

    def _follow_decisions(self, now_s: float) -> None:
        """Describe which ranks have not reached the step of a command; record the results."""
        waiting: Mapping[str, Any] | None = None
        for id_, decided in list(self._decisions.items()):
            reports = {number: self._files.report(number) for number in range(1, self._ranks)}
            reports[0] = self._report
            late = [n for n in sorted(reports) if id_ not in reports[n].taken and self._trains(n)]
            decided.reported = decided.reported or self._report_results(decided, reports, now_s)
            if not late and decided.reported:
                del self._decisions[id_]
            elif late and waiting is None and now_s - decided.since_s >= LATE_S:
                command, step = decided.notice.command, decided.notice.step
                found = [(find_rank(self._recorder.folder, number), number) for number in late]
                waiting = {
                    "id": id_,
                    "name": command.name.value,
                    "step": step,
                    "since": decided.since,
                    "ranks": [number if rank is None else rank.rank for rank, number in found],
                }
        if waiting != self._described:
            self._recorder.describe(command_waits=waiting)
            self._described = waiting

    def _report_results(
        self, decided: _Decided, reports: Mapping[int, RankReport], now_s: float
    ) -> bool:
        """Record number 0's event once the results are there, or RESULTS_S after its own."""
        command = decided.notice.command
        results = {
            n: one.results[command.id] for n, one in reports.items() if command.id in one.results
        }
        if 0 not in results:
            return False
        if decided.ended_s is None:
            decided.ended_s = now_s
        missing = [number for number in reports if number not in results and self._trains(number)]
        if missing and now_s - decided.ended_s < RESULTS_S:
            return False
        self._release_event(command.id, combined(command, results))
        return True

    def _release_event(self, id_: int, text: str | None) -> None:
        with self._events_lock:
            kept = self._kept_events.pop(id_, None)
        if kept is None:
            return
        ended, event = kept
        if text is not None:
            ended = replace(ended, ts=clock.now(), result=text)
            event = replace(event, text=text, data={**event.data, "rank0": event.text})
        self._recorder.put_ended(ended, event)

    def _trains(self, number: int) -> bool:
        """Return whether a rank still trains, according to its file."""
        rank = find_rank(self._recorder.folder, number) if number else None
        return number == 0 or (rank is not None and rank.status.live)

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except (OSError, ValueError) as error:
            if not self._failed:
                log.warning("stepscope: the ranks cannot agree on a command: %s", first_line(error))
            self._failed = True
            return False
        return True
