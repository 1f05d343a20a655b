"""The agreement of a job's ranks on the step at which all of them serve a command. Pure.

Number 0 *proposes* a command. Each rank answers with a step that its training thread has still to
reach, and number 0 *decides*: the highest of the answers. Every rank serves the command at the
first boundary whose step is at least that one. No rank has passed it, because none leaves the
boundary of its own answer before the decision. A command after Pause is served at the same step.

No rank waits for ever. Answers and decisions are made by threads of their own, which no collective
holds up, and a training thread at the boundary of its answer has left all collectives behind. After
the decision no rank stops before the decided step.

If a rank does not answer within `answer_s`, or is gone, the command is withdrawn for all. After
HOLDS times as long a rank goes on without number 0, and refuses a later decision, which is possible
only if number 0's process is suspended while it decides.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.commands.command import Command, CommandName
from stepscope.common.files import atomic_write, read_regular_file

ANSWER_S = 5.0  # Longest wait for the answer of a rank; usually some milliseconds.
HOLDS = 4.0
"""Longest wait of a training thread for a decision, as a multiple of the wait for an answer."""
KEPT = 64  # Closed notices and results that are kept for slow readers.
T = TypeVar("T")


class ProposalState(StrEnum):
    """The state of the agreement on a command."""

    PROPOSED = "proposed"
    DECIDED = "decided"
    WITHDRAWN = "withdrawn"


class Proposal(msgspec.Struct, frozen=True):
    """Number 0's state of one command: a decided one has a step, a withdrawn one a reason."""

    command: Command
    state: ProposalState = ProposalState.PROPOSED
    step: int | None = None
    why: str | None = None


class RankReport(msgspec.Struct):
    """The state of a rank. The keys are ids of commands.

    `answers` are the first steps at which it may serve them, `taken` those at which it has.
    `results` have `ok`, and bytes `before` and `after` by metric. `stop` is why all must stop.
    """

    answers: dict[int, int] = {}
    taken: dict[int, int] = {}
    results: dict[int, dict[str, Any]] = {}
    stop: str | None = None


Votes = Mapping[int, int]


class Coordinator:
    """Number 0's part; all but `ask` belongs to one thread. Commands are decided in order."""

    def __init__(
        self,
        *,
        answer_s: float = ANSWER_S,
        silent: Callable[[int], str] = "rank {} has not answered".format,
    ) -> None:
        self.notices: tuple[Proposal, ...] = ()
        self._answer_s = answer_s
        self._silent = silent
        self._asked: deque[Command] = deque()
        self._since: dict[int, float] = {}
        self.paused_at: int | None = None
        """The step of the last Pause, until Resume or Stop."""

    def ask(self, command: Command) -> None:
        """Propose a command at the next look; from any thread."""
        self._asked.append(command)

    @property
    def open(self) -> list[Proposal]:
        """The commands that are proposed and not decided."""
        return [notice for notice in self.notices if notice.state is ProposalState.PROPOSED]

    def propose(self, now_s: float) -> bool:
        """Propose what was asked; return whether there is a new notice."""
        found = False
        while self._asked:
            command = self._asked.popleft()
            self._since[command.id] = now_s
            self._keep([*self.notices, Proposal(command)])
            found = True
        return found

    def decide(self, now_s: float, answers: Mapping[int, Votes], gone: Mapping[int, str]) -> bool:
        """Decide or withdraw the oldest proposals; return whether a notice has changed.

        `answers` has the ranks that take part, by number. `gone` has the reason of those that will
        never answer.
        """
        changed = False
        for notice in self.open:
            steps = [of_rank.get(notice.command.id) for of_rank in answers.values()]
            # The time first: a process that was suspended must not decide on old answers.
            if gone or now_s - self._since[notice.command.id] >= self._answer_s:
                why = "; ".join(gone.values()) or self._why(notice, answers)
                self._replace(replace(notice, state=ProposalState.WITHDRAWN, why=why))
            elif None in steps:
                return changed
            else:
                step = self._step(notice, max(step for step in steps if step is not None))
                self._replace(replace(notice, state=ProposalState.DECIDED, step=step))
            changed = True
        return changed

    def withdraw(self, why: str) -> None:
        """Withdraw every proposal."""
        for notice in self.open:
            self._replace(replace(notice, state=ProposalState.WITHDRAWN, why=why))

    def _step(self, notice: Proposal, answered: int) -> int:
        """Return the step to serve it at; after a pause that of the pause."""
        name = notice.command.name
        step = answered if self.paused_at is None else self.paused_at
        if name is CommandName.PAUSE:
            self.paused_at = step
        elif name in (CommandName.RESUME, CommandName.STOP):
            self.paused_at = None
        return step

    def _why(self, notice: Proposal, answers: Mapping[int, Votes]) -> str:
        late = [number for number, given in answers.items() if notice.command.id not in given]
        # Where all have answered, number 0 itself was suspended.
        said = ", ".join(map(self._silent, late)) or "rank 0 has not decided"
        return f"{said} for {self._answer_s:g} s"

    def _replace(self, notice: Proposal) -> None:
        self._since.pop(notice.command.id, None)
        same = notice.command.id
        self._keep([notice if old.command.id == same else old for old in self.notices])

    def _keep(self, notices: Sequence[Proposal]) -> None:
        closed = [notice for notice in notices if notice.state is not ProposalState.PROPOSED]
        over = {notice.command.id for notice in closed[:-KEPT]}
        self.notices = tuple(notice for notice in notices if notice.command.id not in over)


class Participant:
    """The part that every rank has, number 0 too.

    `hear` belongs to the agreement's thread; `take`, `put_back`, `may_leave` and `leave` to the
    training thread. `step` returns the step that the training has counted last. `lead` is how many
    steps later it surely looks at `waiting` again: 1 where it looks after counting a step, 2 where
    it looks before. `flag` is called when `waiting` is not empty.
    """

    def __init__(
        self,
        step: Callable[[], int],
        *,
        lead: int,
        flag: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.step = step
        self.lead = lead
        self.answers: dict[int, int] = {}
        """What to tell number 0, of the commands that are neither decided nor withdrawn."""
        self.late: list[Proposal] = []
        """Decisions that came after this rank had gone on without."""
        self._waiting: deque[object] = deque()
        self.waiting: Collection[object] = self._waiting
        self._flag = flag
        self._clock = clock
        self._hold_s = HOLDS * answer_s
        self._lock = threading.RLock()  # a signal handler may come in the middle
        self._closed: set[int] = set()
        self._given_up: set[int] = set()
        self._decided: deque[tuple[int, Command]] = deque()
        self._kept: deque[Command] = deque()
        self._stands = False
        """The training is at the first boundary of its step, and asks before it leaves."""
        self._passed = -1
        """The highest step of which a boundary may have been passed."""
        self._held_since: dict[int, float] = {}

    def hear(self, notices: Sequence[Proposal]) -> list[Proposal]:
        """Take in what number 0 says; return the notices that are news."""
        news = [notice for notice in notices if self._is_news(notice)]
        for notice in news:
            if notice.state is ProposalState.PROPOSED:
                self._answer(notice.command)
            else:
                self._close(notice)
        gone = self._closed - {notice.command.id for notice in notices}
        self._closed -= gone
        self._given_up -= gone
        return news

    def unserved(self) -> list[tuple[int, Command]]:
        """Return the commands that are decided and not yet taken, with their steps."""
        with self._lock:
            return list(self._decided)

    def take(self) -> list[Command]:
        """Return what is due at this boundary, where the training now stands."""
        with self._lock:
            step = self.step()
            # A step may have several boundaries (validation, a second optimizer), and another rank
            # may be at another one of them: only the first is the same place on all ranks.
            self._stands = self._stands or step > self._passed
            self._passed = max(self._passed, step)
            due = list(self._kept)
            self._kept.clear()
            while self._decided and self._decided[0][0] <= step:
                due.append(self._decided.popleft()[1])
            self._look()
            return due

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary."""
        with self._lock:
            self._kept.extendleft(reversed(commands))
            self._look()

    def may_leave(self) -> bool:
        """Say whether the training may leave this boundary, and take it as gone if so.

        It may not while a command is due here, or is proposed with this step as the answer.
        """
        with self._lock:
            step = self.step()
            if self._decided and self._decided[0][0] <= step:
                return False
            held = [id_ for id_, answer in self.answers.items() if answer <= step]
            if any([not self._tired(id_) for id_ in held]):
                return False
            for id_ in held:
                self._given_up.add(id_)
                del self.answers[id_]
            self.leave()
            return True

    def leave(self) -> None:
        """The training is between two boundaries again."""
        with self._lock:
            self._stands = False
            self._held_since.clear()
            self._look()

    def _is_news(self, notice: Proposal) -> bool:
        id_ = notice.command.id
        is_answered = id_ in self.answers or id_ in self._given_up
        return id_ not in self._closed and not (
            notice.state is ProposalState.PROPOSED and is_answered
        )

    def _answer(self, command: Command) -> None:
        with self._lock:
            # The flag first, then the step: whatever the training thread counts after this reading,
            # it looks at the flag after counting. So it cannot pass the step that is answered.
            fresh = not self._waiting
            self._raise()
            step = self.step()
            if fresh:  # boundaries up to here may not have looked
                self._passed = max(self._passed, step)
            self.answers[command.id] = step if self._stands else step + self.lead

    def _close(self, notice: Proposal) -> None:
        with self._lock:
            self._closed.add(notice.command.id)
            answered = self.answers.pop(notice.command.id, None)
            if notice.state is ProposalState.DECIDED and notice.step is not None:
                if answered is not None:
                    self._decided.append((notice.step, notice.command))
                elif notice.command.id in self._given_up:
                    self.late.append(notice)
            self._look()

    def _tired(self, id_: int) -> bool:
        now_s = self._clock()
        return now_s - self._held_since.setdefault(id_, now_s) >= self._hold_s

    def _look(self) -> None:
        """Raise the flag, or take it down."""
        if self.answers or self._decided or self._kept:
            self._raise()
        else:
            self._waiting.clear()

    def _raise(self) -> None:
        if not self._waiting:
            self._waiting.append(self)
        self._flag()


FOLDER = "agreement"
NOTICES = "notices.json"
BYTES_LIMIT = 2**20


class ConsensusFiles:
    """The files of one job. Writing raises OSError.

    They are not durable: a power failure also ends the processes that would read them.
    """

    def __init__(self, run_folder: Path) -> None:
        self.notices_path = run_folder / FOLDER / NOTICES
        self.reports_folder = run_folder / FOLDER / "answers"
        self.reports_folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[Path, tuple[bytes, Any]] = {}

    def write_notices(self, notices: Sequence[Proposal]) -> None:
        """Replace the notices; number 0 alone."""
        atomic_write(self.notices_path, msgspec.json.encode(notices), durable=False)

    def notices(self) -> list[Proposal]:
        """Return number 0's notices."""
        return self._read(self.notices_path, list[Proposal]) or []

    def write_report(self, number: int, report: bytes) -> None:
        """Replace the report of a rank, which is encoded."""
        atomic_write(self._path(number), report, durable=False)

    def report(self, number: int) -> RankReport:
        """Return the report of a rank, an empty one before its first."""
        return self._read(self._path(number), RankReport) or RankReport()

    def _path(self, number: int) -> Path:
        return self.reports_folder / f"rank{number}.json"

    def _read(self, path: Path, type_: type[T]) -> T | None:
        """Return the content; None for a file that is missing or invalid.

        It is decoded again if the bytes differ. Inode and time may be the same: ext4 reuses inodes,
        and times may have ticks of 4 ms. Reading costs 10 us, only while a command is under way.
        """
        try:
            content = read_regular_file(path, BYTES_LIMIT)
            if self._known.get(path, (None,))[0] != content:
                self._known[path] = content, msgspec.json.decode(content, type=type_)
        except (OSError, ValueError, RecursionError):
            return None  # none yet, or replaced on a network disk while it was read
        found: T = self._known[path][1]
        return found
