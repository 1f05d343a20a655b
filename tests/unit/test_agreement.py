"""The agreement of ranks on a step: any interleaving of threads, steps, commands and deaths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.session.consensus import (
    MAX_HOLD_FACTOR,
    VOTE_TIMEOUT_S,
    Coordinator,
    Participant,
    Proposal,
)
from stepscope.store.commands import Command, CommandName

LOOK_AFTER, LOOK_BEFORE = 1, 2


def command(number: int, name: CommandName = CommandName.MARK) -> Command:
    return Command(number, name, {})


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rank:
    """A rank whose training is a generator: between any two of its actions others may act."""

    number: int
    lead: int
    clock: Clock
    boundaries: int = 1
    """Boundaries of each step, as with a second optimizer or in validation."""
    step: int = 0
    alive: bool = True
    published: dict[int, int] = field(default_factory=dict)
    served: list[tuple[int, int, int]] = field(default_factory=list)
    """Id of the command, step, and which boundary of the step."""
    paused: bool = False

    def __post_init__(self) -> None:
        self.member = Participant(lambda: self.step, lead=self.lead, clock=self.clock)

    def train(self, job: Job) -> Iterator[None]:
        while True:
            # The collective of a step: nobody ends it before all have entered it.
            job.entered[self.number] = self.step + 1
            while any(entered <= self.step for entered in job.entered.values()):
                yield
            looked = bool(self.member.waiting)
            yield
            self.step += 1
            yield
            for boundary in range(self.boundaries):
                if self.lead == LOOK_AFTER:
                    looked = bool(self.member.waiting)
                    yield
                if looked:
                    yield from self.serve(boundary)

    def serve(self, boundary: int) -> Iterator[None]:
        while True:
            while (due := self.member.take(paused=self.paused)) is not None:
                yield
                self.served.append((due.id, self.step, boundary))
                if due.name in (CommandName.PAUSE, CommandName.RESUME):
                    self.paused = due.name is CommandName.PAUSE
            if not self.paused and self.member.may_leave():
                return
            yield


class Job:
    """Ranks, number 0's thread, and files that are read some time after they are written."""

    def __init__(self, ranks: int, lead: int, boundaries: int) -> None:
        self.clock = Clock()
        self.leader = Coordinator()
        self.closed: list[Proposal] = []
        self.entered = dict.fromkeys(range(ranks), 0)
        self.ranks = [Rank(number, lead, self.clock, boundaries) for number in range(ranks)]
        self.trainings = [rank.train(self) for rank in self.ranks]
        self.published: list[Proposal] = []

    def lead(self) -> None:
        if not self.ranks[0].alive:
            return
        leader, own = self.leader, self.ranks[0]
        leader.propose(self.clock())
        own.member.update(leader.proposals)
        own.published = dict(own.member.votes)
        if (proposal := leader.open) is not None:
            id_ = proposal.command.id
            taking_part = [rank.published for rank in self.ranks]
            votes = [published[id_] for published in taking_part if id_ in published]
            missing = ["a rank"] * (len(taking_part) - len(votes))
            if (closed := leader.closed(self.clock(), votes, missing)) is not None:
                leader.close(closed)
                self.closed.append(closed)
        own.member.update(leader.proposals)
        self.published = leader.proposals

    def hear(self, rank: Rank) -> None:
        if rank.alive and rank.number:
            rank.member.update(self.published)
            rank.published = dict(rank.member.votes)

    def train(self, rank: Rank) -> None:
        if rank.alive:
            next(self.trainings[rank.number], None)

    def act(self, action: int) -> None:
        """One action: of a rank's training or thread; those of number 0 count double."""
        rank = self.ranks[action // 2 % len(self.ranks)]
        if action % 2:
            self.train(rank)
        elif rank.number:
            self.hear(rank)
        else:
            self.lead()

    def settle(self) -> None:
        """Let all go on until nothing is open any more."""
        for _ in range(400):
            self.lead()
            for rank in self.ranks:
                self.hear(rank)
                self.train(rank)
            self.clock.now_s += VOTE_TIMEOUT_S / 50


def follow(job: Job, actions: list[int], asked: dict[int, CommandName], dying: int | None) -> None:
    for at, action in enumerate(actions):
        if at in asked:
            job.leader.submit(command(at, asked[at]))
        if dying is not None and at == dying % max(1, len(actions)):
            job.ranks[-1].alive = False
        job.act(action)
    for at in sorted(asked):
        if at >= len(actions):
            job.leader.submit(command(at, asked[at]))


ACTIONS = st.lists(st.integers(0, 2**16), max_size=400)
NAMES = st.sampled_from([CommandName.PAUSE, CommandName.RESUME, CommandName.MARK])
ASKED = st.dictionaries(st.integers(0, 400), NAMES, max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ACTIONS, ASKED, st.integers(2, 4), st.sampled_from([LOOK_AFTER, LOOK_BEFORE]), st.integers(1, 3)
)
def test_all_ranks_serve_every_command_at_the_same_boundary(
    actions: list[int], asked: dict[int, CommandName], ranks: int, lead: int, boundaries: int
) -> None:
    job = Job(ranks, lead, boundaries)
    follow(job, actions, asked, None)
    job.leader.submit(command(10**6, CommandName.RESUME))
    job.settle()
    assert not [one for one in job.closed if one.step is None]
    served = [rank.served for rank in job.ranks]
    assert [one for one, _, _ in served[0]] == [*sorted(asked), 10**6]
    assert served == [served[0]] * ranks
    assert all(boundary == 0 for _, _, boundary in served[0])
    steps = [rank.step for rank in job.ranks]
    job.settle()
    assert all(rank.step > step for rank, step in zip(job.ranks, steps, strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(ACTIONS, ASKED, st.integers(2, 4), st.integers(0, 400))
def test_a_rank_that_dies_leaves_the_others_with_the_same_commands(
    actions: list[int], asked: dict[int, CommandName], ranks: int, dying: int
) -> None:
    """The others sit in a collective then, all at the same step: what they served is the same."""
    job = Job(ranks, LOOK_AFTER, 1)
    follow(job, actions, {**asked, 401: CommandName.RESUME}, dying)
    job.ranks[-1].alive = False
    job.settle()
    assert job.leader.open is None
    left = [rank.served for rank in job.ranks[:-1]]
    assert left == [left[0]] * (ranks - 1)
    # What the dead rank has served, the others have or will, at the same steps.
    waiting = [(one.command.id, one.step) for one in job.ranks[0].member._pending]
    theirs = [(id_, step) for id_, step, _ in left[0]] + waiting
    assert [(id_, step) for id_, step, _ in job.ranks[-1].served] == theirs[
        : len(job.ranks[-1].served)
    ]
    for rank in job.ranks[:-1]:
        assert not rank.member.votes, "a rank is held by a command that nobody decides"


@pytest.mark.parametrize(
    ("now_s", "votes", "missing", "gone", "reason"),
    [
        (0.0, [4], [], "rank 1 is gone", "rank 1 is gone"),
        (VOTE_TIMEOUT_S, [4], ["rank 1"], None, "rank 1 has not answered for 5 s"),
        # Rank 0 was suspended: the votes are old.
        (VOTE_TIMEOUT_S, [4, 5], [], None, "rank 0 has not answered for 5 s"),
    ],
)
def test_a_command_is_withdrawn_after_an_exit_silence_or_a_suspension(
    now_s: float, votes: list[int], missing: list[str], gone: str | None, reason: str
) -> None:
    leader = Coordinator()
    leader.submit(command(1))
    leader.propose(0.0)
    assert leader.closed(now_s, votes, missing, gone) == Proposal(command(1), None, reason)


def test_commands_are_proposed_one_after_the_other() -> None:
    leader = Coordinator()
    for number in range(20):
        leader.submit(command(number))
    for number in range(20):
        assert leader.propose(0.0)
        assert not leader.propose(0.0)
        assert leader.closed(0.0, [4], ["rank 1"]) is None
        closed = leader.closed(0.0, [4, 7], [])
        assert closed == Proposal(command(number), 7)
        leader.close(closed)
    assert not leader.propose(0.0)
    assert len(leader.proposals) < 20, "the file would grow"


def test_a_training_that_is_held_goes_on_without_number_0_and_refuses_a_late_decision() -> None:
    clock, step = Clock(), 3
    member = Participant(lambda: step, lead=1, clock=clock)
    proposed = Proposal(command(1))
    assert member.update([proposed]) == [proposed]
    assert member.update([proposed]) == []
    assert member.votes == {1: 4}
    step = 4
    assert member.take() is None
    assert not member.may_leave()
    clock.now_s = MAX_HOLD_FACTOR * VOTE_TIMEOUT_S
    assert member.may_leave()
    assert not member.waiting
    assert member.update([proposed, Proposal(command(1), 4)]) == []
    assert member.take() is None
    assert member.may_leave()


def test_a_paused_rank_executes_what_the_others_execute_later() -> None:
    """Such as one that has continued alone, and reached a later step."""
    member = Participant(lambda: 7, lead=1)
    member.update([Proposal(command(1))])
    member.update([Proposal(command(1), 9)])
    assert member.take() is None
    assert member.take(paused=True) == command(1)
