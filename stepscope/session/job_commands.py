"""Commands of one rank of a job, executed by all ranks at the same step (`consensus.py`).

A thread sleeps until a file of the protocol is replaced. A training thread in a collective and a
writer thread that waits for the disk do not delay it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stepscope.common.files import (
    REPLACED,
    WakeableSleep,
    atomic_write,
    is_network_filesystem,
    read_regular_file,
)
from stepscope.common.json_values import first_line
from stepscope.run import RunStatus
from stepscope.run.rank_info import find_rank
from stepscope.session.consensus import (
    VOTE_TIMEOUT_S,
    Coordinator,
    Participant,
    Proposal,
    ProposalState,
)
from stepscope.store.commands import Command

if TYPE_CHECKING:
    from stepscope.store.recorder import Recorder

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Interval of reading while a command is pending, or if changes of a file are not reported."""
IDLE_S = 3600.0
NETWORK_VOTE_TIMEOUT_S = 30.0  # A network disk shows a change some seconds later.
JOIN_S = 2.0
MAX_FILE_BYTES = 2**20
T = TypeVar("T")


def read_file(path: Path, type_: type[T]) -> T | None:
    """Return a file of the protocol; None if it is missing, invalid or being replaced."""
    try:
        return msgspec.json.decode(read_regular_file(path, MAX_FILE_BYTES), type=type_)
    except (OSError, ValueError, RecursionError):
        return None


class JobCommands(Participant):
    """Commands of one of the `ranks` that share a run folder.

    `on_command` is called with a command when it is proposed. `on_withdrawn` returns True if the
    run executes a withdrawn command without the other ranks. Raises OSError.
    """

    is_shared = True

    def __init__(
        self,
        recorder: Recorder,
        ranks: int,
        *,
        lead: int,
        step: Callable[[], int],
        on_command: Callable[[Command], None],
        on_withdrawn: Callable[[Command], bool],
    ) -> None:
        self._recorder = recorder
        self._folder = recorder.folder
        self._number = number = recorder.number
        self._ranks = ranks
        self._on_command = on_command
        self._on_withdrawn = on_withdrawn
        self._notices = self._folder / "agreement" / "notices.json"  # The proposals of rank 0.
        self._votes_folder = self._notices.parent / "answers"
        self._votes_folder.mkdir(parents=True, exist_ok=True)
        # Where others replace the files that this rank reads.
        watched = self._notices.parent if number else self._votes_folder
        network = is_network_filesystem(watched)
        timeout_s = NETWORK_VOTE_TIMEOUT_S if network else VOTE_TIMEOUT_S
        super().__init__(
            step,
            lead=lead,
            flag=recorder.request_boundary,
            vote_timeout_s=timeout_s,
        )
        self._coordinator = Coordinator(vote_timeout_s=timeout_s, silence_text=self._silence_text)
        self._written: dict[int, int] | None = None  # the votes in this rank's file
        self._finished: set[int] = set()  # ids of the commands with a result on this rank
        self._came = threading.Event()
        self._closing = False
        self._failed = False
        self._sleeper = WakeableSleep(watched, REPLACED)
        self._is_notified = self._sleeper.sees_touches and not network
        self._wake = self._sleeper.wake
        self._thread = threading.Thread(target=self._work, name="stepscope-agreement", daemon=True)
        self._thread.start()

    def offer(self, command: Command) -> None:
        """Propose a command to all ranks; rank 0 only."""
        self._coordinator.submit(command)
        self._wake()

    def wait(self, timeout_s: float) -> list[Command]:
        """Return the commands that are due within `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def note_result(self, command_id: int) -> None:
        """Record that a command has a result on this rank."""
        self._finished.add(command_id)

    def close(self) -> None:
        """End the protocol, and withdraw the commands that were not executed."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(JOIN_S)
        if self._number:
            return
        self._coordinator.propose(time.monotonic())
        unserved = [(f"step {step}", command) for step, command in list(self.decided)]
        unserved += [("the ranks agreed", one.command) for one in self._coordinator.open]
        self._coordinator.withdraw("the run has ended")
        self._write_notices()
        for before, command in unserved:
            if command.id not in self._finished:  # a Stop may act without a boundary
                text = f"{command.label}: the run ended before {before}"
                self._recorder.finish(command, text, ok=False)

    def abandon(self) -> None:
        """Detach after fork, in the child: never wake the parent's thread."""
        self._wake = lambda: None

    def _work(self) -> None:
        while not self._closing:
            try:
                if self._number:
                    self._handle(read_file(self._notices, list[Proposal]) or [])
                else:
                    self._coordinate()
                self._write_votes()
                busy = bool(self._coordinator.open)
            except Exception:  # the protocol would end with this thread
                if not self._failed:
                    log.exception("stepscope: the ranks may not agree on a command")
                self._failed = busy = True
            self._sleeper.sleep(POLL_S if busy or not self._is_notified else IDLE_S)
            self._sleeper.forget_touches()  # later touches end the next sleep
        self._sleeper.close()

    def _coordinate(self) -> None:
        coordinator, now_s = self._coordinator, time.monotonic()
        if coordinator.propose(now_s):
            self._publish(coordinator.proposals, coordinator.paused_at)
        self._handle(coordinator.proposals)
        before = coordinator.proposals, coordinator.paused_at
        if coordinator.open and coordinator.decide(now_s, *self._votes()):
            self._publish(*before)
            self._handle(coordinator.proposals)

    def _publish(self, proposals: tuple[Proposal, ...], paused_at: int | None) -> None:
        """Write the proposals; if that fails, withdraw those of the given earlier state.

        No rank has read a decision that was not written, so none may execute the command.
        """
        if not self._write_notices():
            self._coordinator.proposals, self._coordinator.paused_at = proposals, paused_at
            self._coordinator.withdraw("the disk refuses the files of the agreement")
            self._write_notices()

    def _votes(self) -> tuple[dict[int, dict[int, int]], dict[int, str]]:
        """Return the participating ranks' votes, and the reasons of the ranks that are gone."""
        open_ = {one.command.id for one in self._coordinator.open}
        votes, gone = {0: dict(self.votes)}, {}
        for number in range(1, self._ranks):
            votes[number] = read_file(self._votes_path(number), dict[int, int]) or {}
            rank = None if open_ <= votes[number].keys() else find_rank(self._folder, number)
            status = None if rank is None else rank.status
            if status in (RunStatus.FINISHED, RunStatus.STOPPED):
                del votes[number]  # its training is over
            elif rank is not None and status in (RunStatus.CRASHED, RunStatus.FAILED):
                end = "is gone" if status is RunStatus.CRASHED else "has failed"
                gone[number] = f"rank {rank.rank} {end}"
        return votes, gone

    def _silence_text(self, number: int) -> str:
        rank = find_rank(self._folder, number)
        return f"rank {rank.rank} has not answered" if rank else f"rank {number} has not started"

    def _handle(self, proposals: Sequence[Proposal]) -> None:
        """Vote and queue decisions; record new and withdrawn commands."""
        for proposal in self.update(proposals):
            if proposal.state is ProposalState.PROPOSED:
                self._announce(proposal.command)
            elif proposal.state is ProposalState.WITHDRAWN:
                self._withdrawn(proposal)
            self._came.set()

    def _announce(self, command: Command) -> None:
        try:
            self._on_command(command)
        except Exception:
            log.exception("stepscope: a command could not be announced")

    def _withdrawn(self, proposal: Proposal) -> None:
        command, why = proposal.command, proposal.why or ""
        served_alone = self._on_withdrawn(command)
        if self._number:
            return
        if served_alone:
            text = f"{command.label} cannot run at the same step on all ranks: {why}"
            self._recorder.event(command.name, text, ok=False)
        else:
            text = f"{command.label}: withdrawn on all ranks: {why}"
            self._recorder.finish(command, text, ok=False)

    def _votes_path(self, number: int) -> Path:
        return self._votes_folder / f"rank{number}.json"

    def _write_votes(self) -> None:
        """Replace this rank's file if its votes have changed."""
        votes = dict(self.votes)
        is_new = self._number > 0 and votes != self._written
        if is_new and self._write(self._votes_path(self._number), votes):
            self._written = votes

    def _write_notices(self) -> bool:
        return self._write(self._notices, self._coordinator.proposals)

    def _write(self, path: Path, content: object) -> bool:
        """Replace a file, not durably: a power failure also ends the processes that read it."""
        try:
            atomic_write(path, msgspec.json.encode(content), durable=False)
        except (OSError, ValueError) as error:
            if not self._failed:
                log.warning("stepscope: the ranks cannot agree on a command: %s", first_line(error))
            self._failed = True
            return False
        return True
