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
from msgspec.structs import replace

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
from stepscope.session.consensus import VOTE_TIMEOUT_S, Coordinator, Participant, Proposal
from stepscope.store.commands import Command, CommandQueue

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


class JobCommands(Participant, CommandQueue):
    """Commands of one of the `ranks` that share a run folder.

    `on_command` is called with a command when it is proposed. `on_withdrawn` returns True if the
    run executes a withdrawn command without the other ranks. Raises OSError.
    """

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
        self._number = recorder.number
        self._ranks = ranks
        self._on_command = on_command
        self._on_withdrawn = on_withdrawn
        folder = recorder.folder / "agreement"
        self._proposals_file = folder / "proposals.json"  # The proposals of rank 0.
        self._votes_folder = folder / "votes"
        self._votes_folder.mkdir(parents=True, exist_ok=True)
        # Where others replace the files that this rank reads.
        watched = folder if self._number else self._votes_folder
        network = is_network_filesystem(watched)
        timeout_s = NETWORK_VOTE_TIMEOUT_S if network else VOTE_TIMEOUT_S
        super().__init__(step, lead=lead, flag=recorder.request_boundary, vote_timeout_s=timeout_s)
        self._coordinator = Coordinator(vote_timeout_s=timeout_s)
        self._written: dict[int, int] = {}  # The votes in this rank's file.
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

    def wait(self, timeout_s: float) -> None:
        """Wait for a decision or withdrawal, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()

    def close(self) -> None:
        """End the protocol; withdraw the open proposal, for which other ranks wait."""
        self._closing = True
        self._wake()
        self._thread.join(JOIN_S)
        proposal = self._coordinator.open
        if proposal is not None:
            self._close_proposal(replace(proposal, reason="the run has ended"))

    def abandon(self) -> None:
        """Detach after fork, in the child: never wake the parent's thread."""
        self._wake = lambda: None

    def _work(self) -> None:
        while not self._closing:
            try:
                is_busy = self._coordinate() if self._number == 0 else self._follow()
            except Exception:  # the protocol would end with this thread
                if not self._failed:
                    log.exception("stepscope: the ranks may not agree on a command")
                self._failed = is_busy = True
            self._sleeper.sleep(POLL_S if is_busy or not self._is_notified else IDLE_S)
            self._sleeper.forget_touches()  # later touches end the next sleep
        self._sleeper.close()

    def _follow(self) -> bool:
        """Vote and note decisions; return False: a replaced file wakes the thread."""
        self._handle(read_file(self._proposals_file, list[Proposal]) or [])
        votes = self.votes
        if votes != self._written and self._write(self._votes_path(self._number), votes):
            self._written = votes
        return False

    def _coordinate(self) -> bool:
        """Propose and decide; return True while a proposal is open. Rank 0 only."""
        now_s = time.monotonic()
        if self._coordinator.propose(now_s):
            self._write(self._proposals_file, self._coordinator.proposals)
            self._handle(self._coordinator.proposals)
        proposal = self._coordinator.open
        if proposal is None:
            return False
        closed = self._coordinator.closed(now_s, *self._votes(proposal.command.id))
        if closed is not None:
            self._close_proposal(closed)
            self._wake()  # for the next command
        return True

    def _close_proposal(self, closed: Proposal) -> None:
        """Replace the open proposal, unless the disk refuses: no rank has read it then."""
        before = self._coordinator.proposals
        self._coordinator.close(closed)
        if self._write(self._proposals_file, self._coordinator.proposals):
            self._handle([closed])
        else:
            self._coordinator.proposals = before

    def _votes(self, command_id: int) -> tuple[list[int], list[str], str | None]:
        """Return the votes, the ranks without one, and the reason if one of these is gone."""
        votes: list[int] = []
        missing: list[str] = []
        gone = None
        for number in range(self._ranks):
            path = self._votes_path(number)
            known = self.votes if number == 0 else read_file(path, dict[int, int]) or {}
            if command_id in known:
                votes.append(known[command_id])
                continue
            rank = find_rank(self._recorder.folder, number)
            name = f"rank {number if rank is None else rank.rank}"
            if rank is None or rank.status.live:
                missing.append(name)
            elif rank.status not in (RunStatus.FINISHED, RunStatus.STOPPED):
                gone = f"{name} is gone"
        return votes, missing, gone

    def _handle(self, proposals: Sequence[Proposal]) -> None:
        """Vote and note decisions; announce new commands, and act on withdrawn ones."""
        for proposal in self.update(proposals):
            if proposal.is_open:
                self._on_command(proposal.command)
            elif proposal.reason is not None:
                self._withdraw(proposal.command, proposal.reason)
            self._came.set()

    def _withdraw(self, command: Command, reason: str) -> None:
        """Execute a withdrawn Stop without the other ranks; rank 0 refuses other commands."""
        if not self._on_withdrawn(command) and self._number == 0:
            text = f"{command.label}: withdrawn on all ranks: {reason}"
            self._recorder.finish(command, text, ok=False)

    def _votes_path(self, number: int) -> Path:
        return self._votes_folder / f"rank{number}.json"

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
