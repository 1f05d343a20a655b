"""Protocol by which all ranks of a job execute a command at the same step boundary.

Rank 0 *proposes* one command after the other. Each rank votes for a step that its training thread
has not reached yet, and rank 0 *decides*: the highest vote. Every rank executes the command at its
first boundary with at least the decided step. No rank has passed that boundary, because a rank
stays at the boundary of its own vote until the decision.

No rank waits forever. Separate threads vote and decide, which no collective blocks. A training
thread at the boundary of its vote has completed all collectives. After the decision no rank stops
before the decided step. A paused rank executes every decided command, whatever its step.

If a rank does not vote within `vote_timeout_s`, or has crashed, rank 0 *withdraws* the command for
all. A rank without a decision for MAX_HOLD_FACTOR times as long continues and ignores a later one.
Such a decision comes only from a process of rank 0 that was suspended while it decided.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from stepscope.store.commands import Command

VOTE_TIMEOUT_S = 5.0  # Votes usually arrive within milliseconds.
MAX_HOLD_FACTOR = 4.0
"""Longest wait of a training thread for a decision, as a multiple of the vote timeout."""
MAX_CLOSED = 8  # Number of closed proposals that are kept for slow readers.


class Proposal(msgspec.Struct, frozen=True):
    """A command that rank 0 proposes: decided once it has a `step`, withdrawn with a `reason`."""

    command: Command
    step: int | None = None
    reason: str | None = None

    @property
    def is_open(self) -> bool:
        """True if the proposal is neither decided nor withdrawn."""
        return self.step is None and self.reason is None


class Coordinator:
    """Proposals and decisions of rank 0. No I/O. Not thread-safe, except `submit`."""

    def __init__(self, *, vote_timeout_s: float = VOTE_TIMEOUT_S) -> None:
        self.proposals: list[Proposal] = []  # The newest is the last; only that may be open.
        self._vote_timeout_s = vote_timeout_s
        self._submitted: deque[Command] = deque()
        self._proposed_s = 0.0

    def submit(self, command: Command) -> None:
        """Queue a command for `propose`. Thread-safe."""
        self._submitted.append(command)

    @property
    def open(self) -> Proposal | None:
        """The proposal that is neither decided nor withdrawn."""
        if self.proposals and self.proposals[-1].is_open:
            return self.proposals[-1]
        return None

    def propose(self, now_s: float) -> bool:
        """Propose the next command if no proposal is open; return True if there is one."""
        if self.open is not None or not self._submitted:
            return False
        # A rank that votes has read all decisions before that proposal.
        self.proposals = [*self.proposals[-MAX_CLOSED:], Proposal(self._submitted.popleft())]
        self._proposed_s = now_s
        return True

    def closed(
        self, now_s: float, votes: Sequence[int], missing: Sequence[str], gone: str | None = None
    ) -> Proposal | None:
        """Return the open proposal as decided or withdrawn; None while votes are missing.

        `missing` has the names of the ranks without a vote, `gone` the reason why one never votes.
        """
        proposal = self.open
        if proposal is None:
            return None
        if gone is not None:
            return replace(proposal, reason=gone)
        # The time first: a process that was suspended must not decide on old votes.
        if now_s - self._proposed_s >= self._vote_timeout_s:
            silent = ", ".join(missing) or "rank 0"
            reason = f"{silent} has not answered for {self._vote_timeout_s:g} s"
            return replace(proposal, reason=reason)
        return None if missing else replace(proposal, step=max(votes))

    def close(self, closed: Proposal) -> None:
        """Replace the open proposal by its decision or withdrawal."""
        self.proposals = [*self.proposals[:-1], closed]


@dataclass
class PendingCommand:
    """A command that a rank has voted for. `step` is the vote, and then the decided step."""

    command: Command
    voted_s: float
    step: int = 0
    is_decided: bool = False


class Participant:
    """Votes and due commands of one rank, rank 0 included. No I/O.

    `update` belongs to the protocol's thread; `take` and `may_leave` to the training thread. `step`
    returns the last step that the training has counted. `lead` is the number of steps until the
    training thread surely checks `waiting` again: 1 if it checks after it counts a step, 2 if
    before. `flag` is called when `waiting` is not empty any more.
    """

    def __init__(
        self,
        step: Callable[[], int],
        *,
        lead: int,
        flag: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        vote_timeout_s: float = VOTE_TIMEOUT_S,
    ) -> None:
        self.step = step
        self.lead = lead
        self._pending: deque[PendingCommand] = deque()
        self.waiting: Collection[object] = self._pending
        self._flag = flag
        self._clock = clock
        self._max_hold_s = MAX_HOLD_FACTOR * vote_timeout_s
        self._lock = threading.RLock()  # a signal handler may come in the middle
        self._newest_id = -1  # That of the last proposal with a vote.

    @property
    def votes(self) -> dict[int, int]:
        """The votes for open proposals by command id."""
        with self._lock:
            return {one.command.id: one.step for one in self._pending if not one.is_decided}

    def update(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Vote for new proposals and note decisions; return the proposals that are news."""
        with self._lock:
            return [one for one in proposals if self._note(one)]

    def take(self, *, paused: bool = False) -> Command | None:
        """Return the next command that is due at this boundary, or in this pause."""
        with self._lock:
            first = self._pending[0] if self._pending else None
            if first is None or not first.is_decided:
                return None
            if not paused and first.step > self.step():
                return None
            return self._pending.popleft().command

    def may_leave(self) -> bool:
        """Return True if the training may leave this boundary.

        It may not while a command is due here, or is proposed with this step as the vote.
        """
        with self._lock:
            oldest_s = self._clock() - self._max_hold_s
            for pending in [one for one in self._pending if one.step <= self.step()]:
                if pending.is_decided or pending.voted_s > oldest_s:
                    return False
                self._pending.remove(pending)
            return True

    def _note(self, proposal: Proposal) -> bool:
        """Vote, or note the decision or withdrawal; return False if it is known."""
        command = proposal.command
        if proposal.is_open:
            is_new = command.id > self._newest_id
            if is_new:
                self._vote(command)
            return is_new
        for pending in self._pending:
            if pending.command.id == command.id and not pending.is_decided:
                if proposal.step is None:
                    self._pending.remove(pending)
                else:
                    pending.step = proposal.step
                    pending.is_decided = True
                return True
        return False  # known, or this rank has continued before the decision

    def _vote(self, command: Command) -> None:
        self._newest_id = command.id
        pending = PendingCommand(command, self._clock())
        # `waiting` first, then the step: the training thread checks `waiting` after it has counted
        # a step that this thread has not read. So it cannot pass the step of the vote.
        self._pending.append(pending)
        self._flag()
        pending.step = self.step() + self.lead
