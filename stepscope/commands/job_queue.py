"""The commands of one rank of a job, served by all ranks at the same step (`consensus.py`).

One thread a rank, asleep until a file of the agreement is replaced: neither a training thread that
waits in a collective nor a writer that waits for the disk holds it up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stepscope.commands.command import Command
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

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often to look while a command is under way, or where no change of a file can be heard."""
IDLE_S = 3600.0
NETWORK_ANSWER_S = 30.0
"""Longest wait for an answer over a network disk, where a change is seen some seconds later."""
WISHES_S = 2.0
"""How often to look over a network disk whether a rank wants all to stop."""
LATE_S = 2.0
"""Age of a decision from which it is said that ranks have not come to its step."""
RESULTS_S = 2.0
"""How long number 0's event waits for the results of the others, from its own on."""

RankResults = Mapping[int, Mapping[str, Any]]
"""By rank, what came of a command: `ok`, and bytes `before` and `after` by metric."""


class JobQueueListener(Protocol):
    """Hears in the agreement's thread what becomes of commands."""

    def heard(self, command: Command) -> None:
        """A command was proposed; it is served later, or withdrawn."""

    def withdrawn(self, command: Command, why: str) -> None:
        """The ranks did not agree: no rank serves it."""

    def refused(self, command: Command, why: str) -> None:
        """The others serve it, but this rank does not."""

    def waits(self, waiting: Mapping[str, Any] | None) -> None:
        """Number 0 alone: ranks have not come to the step of a command; None once all have."""

    def stop_wanted(self, reason: str) -> None:
        """Number 0 alone: another rank wants all to stop."""

    def results(self, command: Command, results: RankResults) -> None:
        """Number 0 alone: what came of it on all ranks, or on those that were quick."""


@dataclass(slots=True)
class _Waited:
    """A decided command of which number 0 follows what becomes, and since when."""

    notice: Proposal
    since_s: float
    since: float
    """The same moment in epoch seconds."""
    ended_s: float | None = None
    """When this rank had its own result."""
    told: bool = False


class JobCommandQueue:
    """The commands of rank `number` of the `ranks` that share a run folder, numbered from 0.

    `step`, `lead` and `flag` are those of `consensus.Member`. Raises OSError where the folder
    cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        ranks: int,
        listener: JobQueueListener,
        *,
        step: Callable[[], int],
        lead: int,
        flag: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._number = number
        self._ranks = ranks
        self._listener = listener
        self._files = ConsensusFiles(folder, number)
        network = is_network_filesystem(self._files.watched)
        answer_s = NETWORK_ANSWER_S if network else ANSWER_S
        self.member = Participant(step, lead=lead, flag=flag, answer_s=answer_s)
        self.waiting = self.member.waiting
        self._leader = Coordinator(answer_s=answer_s, silent=self._silence)
        self._said = RankReport()
        self._written: dict[str, Any] = {}
        self._waited: dict[int, _Waited] = {}
        self._told: Mapping[str, Any] | None = None
        self._wished = False
        self._wishes_due_s = 0.0
        self._came = threading.Event()
        self._closing = False
        self._failed = False
        self._sleeper = WakeableSleep(self._files.watched, REPLACED)
        self._hears = self._sleeper.sees_touches and not network
        self.wake = self._sleeper.wake
        self._thread = threading.Thread(target=self._work, name="stepscope-agreement", daemon=True)
        self._thread.start()

    def offer(self, command: Command) -> None:
        """Have all ranks serve a command; on number 0 alone."""
        self._leader.ask(command)
        self.wake()

    def take(self) -> list[Command]:
        """Return what this boundary has to serve; the training stands there until `may_leave`."""
        taken = self.member.take()
        if taken:
            step = self.member.step()
            # Only the agreement's thread takes entries out.
            for command in taken:
                self._said.taken.setdefault(command.id, step)
            self.wake()
        return taken

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary of this rank."""
        self.member.put_back(commands)

    def wait(self, timeout_s: float) -> list[Command]:
        """Wait for something to serve, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def may_leave(self) -> bool:
        """Say whether the training may leave its boundary: not while the ranks agree on it."""
        return self.member.may_leave()

    def leave(self) -> None:
        """The training has left its boundary by an exception."""
        self.member.leave()

    def ended(self, command: Command, ok: bool, figures: Mapping[str, Any]) -> None:
        """Tell number 0 what came of a command on this rank."""
        self._said.results[command.id] = {"ok": ok, **figures}
        self.wake()

    def want_stop(self, reason: str) -> None:
        """Let number 0 know that all ranks have to stop; from any thread of another rank."""
        self._said.stop = reason
        self.wake()

    def close(self) -> list[tuple[int | None, Command]]:
        """End the agreement; return the commands that this rank has not served, with their steps.

        No rank goes on waiting for this one: number 0 withdraws what is not decided.
        """
        if self._closing:
            return []
        self._closing = True
        self.wake()
        self._thread.join(LATE_S)
        unserved: list[tuple[int | None, Command]] = [*self.member.unserved()]
        if self._number == 0:
            self._leader.propose(time.monotonic())
            unserved += [(None, notice.command) for notice in self._leader.open]
            self._leader.withdraw("the run has ended")
            self._try(self._files.write_notices, self._leader.notices)
        return unserved

    def abandon(self) -> None:
        """In a forked child: the parent's thread must not hear of it."""
        self.wake = lambda: None

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
        """Read what others say and say what is new; return whether to look again soon."""
        if self._number:
            self._hear(self._files.notices())
        else:
            self._lead()
        self._say()
        return bool(self._waited) or bool(self._number == 0 and self._leader.open)

    def _lead(self) -> None:
        leader, now_s = self._leader, time.monotonic()
        self._look_for_wish(now_s)
        if leader.propose(now_s) and not self._publish():
            return
        self._hear(leader.notices)
        if leader.open:
            before, paused_at = leader.notices, leader.paused_at
            answers, gone = self._answers()
            if leader.decide(now_s, answers, gone):
                if not self._publish():
                    # Nobody knows of the decision, so nobody may serve it.
                    leader.take_back(before, paused_at)
                    leader.withdraw("the disk refuses the files of the agreement")
                    self._try(self._files.write_notices, leader.notices)
                self._hear(leader.notices)
        self._follow_up(now_s)

    def _look_for_wish(self, now_s: float) -> None:
        """Pass on the first wish of another rank that all stop."""
        if self._wished or now_s < self._wishes_due_s:
            return
        self._wishes_due_s = now_s + (0.0 if self._hears else WISHES_S)
        wishes = (self._files.said(number).stop for number in range(1, self._ranks))
        reason = next(filter(None, wishes), None)
        if reason is not None:
            self._wished = True
            self._listener.stop_wanted(reason)

    def _publish(self) -> bool:
        """Make number 0's notices known; where the disk refuses that, withdraw what is open."""
        if self._try(self._files.write_notices, self._leader.notices):
            return True
        self._leader.withdraw("the disk refuses the files of the agreement")
        self._hear(self._leader.notices)
        return False

    def _answers(self) -> tuple[dict[int, dict[int, int]], dict[int, str]]:
        """Return the answers of the ranks that take part, and who is gone without an end."""
        wanted = {notice.command.id for notice in self._leader.open}
        answers, gone = {0: dict(self.member.answers)}, {}
        for number in range(1, self._ranks):
            given = self._files.said(number).answers
            if not wanted <= given.keys():
                rank = find_rank(self._folder, number)
                status = None if rank is None else rank.status
                if status in (RunStatus.FINISHED, RunStatus.STOPPED):
                    continue  # its training is over: it has no step to hold at
                if rank is not None and status in (RunStatus.CRASHED, RunStatus.FAILED):
                    end = "is gone" if status is RunStatus.CRASHED else "has failed"
                    gone[number] = f"rank {rank.rank} {end}"
            answers[number] = given
        return answers, gone

    def _silence(self, number: int) -> str:
        rank = find_rank(self._folder, number)
        if rank is None:
            return f"rank {number} has not started"
        process = process_of(rank.run_json) if rank.age_s > 2 else None
        stopped = process is not None and process.status() == "stopped"
        said = f"rank {rank.rank} has not answered"
        return f"{said} (its process is stopped)" if stopped else said

    def _hear(self, notices: Sequence[Proposal]) -> None:
        for notice in self.member.hear(notices):
            if notice.state is ProposalState.PROPOSED:
                self._listener.heard(notice.command)
            elif notice.state is ProposalState.WITHDRAWN:
                self._listener.withdrawn(notice.command, notice.why or "")
            elif self._number == 0:
                entry = _Waited(notice, time.monotonic(), clock.now())
                self._waited[notice.command.id] = entry
            self._came.set()
        for late in self.member.late:
            why = "rank 0 decided after this rank had moved on"
            self._listener.refused(late.command, why)
        self.member.late.clear()

    def _say(self) -> None:
        """Replace this rank's file where it has something new to say."""
        said = self._said
        for entries in (said.taken, said.results):
            for old in list(entries)[:-KEPT]:
                del entries[old]
        said.answers = dict(self.member.answers)
        now: dict[str, Any] = {
            "answers": said.answers,
            "taken": dict(said.taken),
            "results": dict(said.results),
            "stop": said.stop,
        }
        if self._number and now != self._written and self._try(self._files.write_said, said):
            self._written = now

    def _follow_up(self, now_s: float) -> None:
        """Say which ranks have not come to the step of a command, and what came of it on all."""
        waiting: Mapping[str, Any] | None = None
        for id_, waited in list(self._waited.items()):
            said = {number: self._files.said(number) for number in range(1, self._ranks)}
            said[0] = self._said
            late = [n for n in sorted(said) if id_ not in said[n].taken and self._trains(n)]
            if not waited.told:
                waited.told = self._tell_results(waited, said, now_s)
            if not late and waited.told:
                del self._waited[id_]
            elif late and waiting is None and now_s - waited.since_s >= LATE_S:
                waiting = {
                    "id": id_,
                    "name": waited.notice.command.name.value,
                    "step": waited.notice.step,
                    "since": waited.since,
                    "ranks": [self._rank(number) for number in late],
                }
        if waiting != self._told:
            self._listener.waits(waiting)
            self._told = waiting

    def _tell_results(self, waited: _Waited, said: Mapping[int, RankReport], now_s: float) -> bool:
        command = waited.notice.command
        results = {
            n: one.results[command.id] for n, one in said.items() if command.id in one.results
        }
        if 0 not in results:
            return False
        if waited.ended_s is None:
            waited.ended_s = now_s
        missing = [number for number in said if number not in results and self._trains(number)]
        if missing and now_s - waited.ended_s < RESULTS_S:
            return False
        self._listener.results(command, results)
        return True

    def _rank(self, number: int) -> int:
        """Return torch's number of a rank."""
        rank = find_rank(self._folder, number)
        return number if rank is None else rank.rank

    def _trains(self, number: int) -> bool:
        """Say whether a rank still trains, as far as its file tells."""
        rank = find_rank(self._folder, number) if number else None
        return number == 0 or (rank is not None and rank.status.live)

    def _try(self, write: Callable[[Any], None], content: Any) -> bool:
        try:
            write(content)
        except OSError as error:
            if not self._failed:
                log.warning("stepscope: the ranks cannot agree on a command: %s", first_line(error))
            self._failed = True
            return False
        return True
