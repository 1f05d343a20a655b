"""Protocol by which all ranks of a job execute a command at the same step boundary.

Rank 0 *proposes* a command. Each rank votes for a step that its training thread has not reached
yet, and rank 0 *decides*: the highest vote. Every rank executes the command at the first boundary
with at least the decided step. No rank has passed that boundary, because a rank stays at the
boundary of its own vote until the decision. A command after Pause is executed at the same step.

No rank waits forever. Separate threads vote and decide, which no collective blocks. A training
thread at the boundary of its vote has completed all collectives. After the decision no rank stops
before the decided step.

If a rank does not vote within `vote_timeout_s`, or has exited, rank 0 *withdraws* the command for
all. After MAX_HOLD_FACTOR times as long without news of rank 0 a rank continues and ignores a later
decision. Such a decision comes only from a process of rank 0 that was suspended while it decided.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from stepscope.store.commands import Command, CommandName

VOTE_TIMEOUT_S = 5.0  # Votes usually arrive within milliseconds.
MAX_HOLD_FACTOR = 4.0
"""Longest wait of a training thread for a decision, as a multiple of the vote timeout."""
MAX_CLOSED = 64  # Closed proposals that are kept for slow readers.


class ProposalState(StrEnum):
    PROPOSED = "proposed"
    DECIDED = "decided"
    WITHDRAWN = "withdrawn"


class Proposal(msgspec.Struct, frozen=True):
    """Rank 0's state of one command; a step if decided, a reason (`why`) if withdrawn."""

    command: Command
    state: ProposalState = ProposalState.PROPOSED
    step: int | None = None
    why: str | None = None


class Coordinator:
    """Proposals and decisions of rank 0, in the order of the commands. No I/O.

    Not thread-safe, except `submit`.
    """

    def __init__(
        self,
        *,
        vote_timeout_s: float = VOTE_TIMEOUT_S,
        silence_text: Callable[[int], str] = "rank {} has not answered".format,
    ) -> None:
        self.proposals: tuple[Proposal, ...] = ()
        self.paused_at: int | None = None  # The step of the last Pause, until Resume or Stop.
        self._vote_timeout_s = vote_timeout_s
        self._silence_text = silence_text
        self._submitted: deque[Command] = deque()
        self._since: dict[int, float] = {}

    def submit(self, command: Command) -> None:
        """Queue a command for the next `propose`. Thread-safe."""
        self._submitted.append(command)

    @property
    def open(self) -> list[Proposal]:
        """The proposals that are neither decided nor withdrawn."""
        return [one for one in self.proposals if one.state is ProposalState.PROPOSED]

    def propose(self, now_s: float) -> bool:
        """Propose the submitted commands; return True if there are any."""
        count = len(self._submitted)
        for _ in range(count):
            command = self._submitted.popleft()
            self._since[command.id] = now_s
            self.proposals += (Proposal(command),)
        return count > 0

    def decide(
        self, now_s: float, votes: Mapping[int, Mapping[int, int]], gone: Mapping[int, str]
    ) -> bool:
        """Decide or withdraw the oldest proposals; return True if a proposal has changed.

        `votes` has the votes by command of each participating rank, `gone` the reasons of the ranks
        that will never vote.
        """
        changed = False
        for proposal in self.open:
            id_ = proposal.command.id
            steps = [of_rank.get(id_) for of_rank in votes.values()]
            # The time first: a process that was suspended must not decide on old votes.
            if gone or now_s - self._since[id_] >= self._vote_timeout_s:
                late = [rank for rank, of_rank in votes.items() if id_ not in of_rank]
                # Where all have voted, rank 0 itself was suspended.
                silent = ", ".join(map(self._silence_text, late)) or "rank 0 has not decided"
                why = "; ".join(gone.values()) or f"{silent} for {self._vote_timeout_s:g} s"
                self._close(replace(proposal, state=ProposalState.WITHDRAWN, why=why))
            elif None in steps:
                break
            else:
                name, step = proposal.command.name, self.paused_at
                if step is None:
                    step = max(vote for vote in steps if vote is not None)
                if name is CommandName.PAUSE:
                    self.paused_at = step
                elif name in (CommandName.RESUME, CommandName.STOP):
                    self.paused_at = None
                self._close(replace(proposal, state=ProposalState.DECIDED, step=step))
            changed = True
        return changed

    def withdraw(self, why: str) -> None:
        for proposal in self.open:
            self._close(replace(proposal, state=ProposalState.WITHDRAWN, why=why))

    def _close(self, closed: Proposal) -> None:
        """Replace a proposal, and drop closed proposals beyond MAX_CLOSED."""
        id_ = closed.command.id
        self._since.pop(id_, None)
        kept = [closed if one.command.id == id_ else one for one in self.proposals]
        over = [one for one in kept if one.state is not ProposalState.PROPOSED][:-MAX_CLOSED]
        self.proposals = tuple(one for one in kept if one not in over)


class Participant:
    """Votes and due commands of one rank, rank 0 included. No I/O.

    `update` belongs to the protocol's thread; `take`, `put_back`, `may_leave` and `leave` to the
    training thread. `step` returns the last step that the training has counted. `lead` is the
    number of steps until the training thread surely checks `waiting` again: 1 if it checks after it
    counts a step, 2 if before. `flag` is called when `waiting` is not empty.
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
        self.votes: dict[int, int] = {}  # Votes by command id, of the open proposals.
        self._waiting: deque[object] = deque()
        self.waiting: Collection[object] = self._waiting
        self._flag = flag
        self._clock = clock
        self._max_hold_s = MAX_HOLD_FACTOR * vote_timeout_s
        self._lock = threading.RLock()  # a signal handler may come in the middle
        self._closed: set[int] = set()
        self._given_up: set[int] = set()
        self.decided: deque[tuple[int, Command]] = deque()
        """Steps and commands that are decided and not yet taken."""
        self._kept: deque[Command] = deque()
        self._at_boundary = False
        """The training is at the first boundary of its step, and calls `may_leave` there."""
        self._passed = -1  # The highest step of which a boundary may have been passed.
        self._held_since: float | None = None

    def update(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Vote for new proposals and queue decisions; return the proposals that are news."""
        with self._lock:
            news = [one for one in proposals if self._is_news(one)]
            for proposal in news:
                self._held_since = None  # rank 0 is active
                if proposal.state is ProposalState.PROPOSED:
                    self._vote(proposal.command)
                else:
                    self._close(proposal)
            if proposals:  # none: the file could not be read
                known = {one.command.id for one in proposals}
                self._closed &= known
                self._given_up &= known
            return news

    def take(self) -> list[Command]:
        """Return the commands due at this boundary; the training is at it from now on."""
        with self._lock:
            step = self.step()
            # A step may have several boundaries (validation, a second optimizer), and another rank
            # may be at another one of them: only the first is the same place on all ranks.
            self._at_boundary = self._at_boundary or step > self._passed
            self._passed = max(self._passed, step)
            due = list(self._kept)
            self._kept.clear()
            while self.decided and self.decided[0][0] <= step:
                due.append(self.decided.popleft()[1])
            self._set_flag()
            return due

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary."""
        with self._lock:
            self._kept.extendleft(reversed(commands))
            self._set_flag()

    def may_leave(self) -> bool:
        """Return True if the training may leave this boundary, and record that it leaves.

        It may not while a command is due here, or is proposed with this step as the vote.
        """
        with self._lock:
            step = self.step()
            if self.decided and self.decided[0][0] <= step:
                return False
            held = [id_ for id_, vote in self.votes.items() if vote <= step]
            if held:
                now_s = self._clock()
                self._held_since = now_s if self._held_since is None else self._held_since
                if now_s - self._held_since < self._max_hold_s:
                    return False
            self._given_up.update(held)
            for id_ in held:
                del self.votes[id_]
            self.leave()
            return True

    def leave(self) -> None:
        """Record that the training is between two boundaries again."""
        with self._lock:
            self._at_boundary = False
            self._held_since = None
            self._set_flag()

    def _is_news(self, proposal: Proposal) -> bool:
        id_ = proposal.command.id
        has_vote = id_ in self.votes or id_ in self._given_up
        return id_ not in self._closed and not (
            proposal.state is ProposalState.PROPOSED and has_vote
        )

    def _vote(self, command: Command) -> None:
        # The flag first, then the step: the training thread checks the flag after it has counted
        # a step that this thread has not read. So it cannot pass the step of the vote.
        is_first = not self._waiting
        self._raise_flag()
        step = self.step()
        if is_first:  # boundaries up to here may not have checked the flag
            self._passed = max(self._passed, step)
        self.votes[command.id] = step if self._at_boundary else step + self.lead

    def _close(self, proposal: Proposal) -> None:
        id_ = proposal.command.id
        self._closed.add(id_)
        vote = self.votes.pop(id_, None)
        # Without a vote, this rank has continued before the decision, and ignores it.
        if proposal.step is not None and vote is not None:
            self.decided.append((proposal.step, proposal.command))
        self._set_flag()

    def _set_flag(self) -> None:
        if self.votes or self.decided or self._kept:
            self._raise_flag()
        else:
            self._waiting.clear()

    def _raise_flag(self) -> None:
        if not self._waiting:
            self._waiting.append(self)
        self._flag()
