"""What NCCL's RAS service answered: which ranks it misses, and how far each has come; pure.

RAS (reliability, availability, serviceability) is part of NCCL since 2.24. Its answer is text for
people, whose words change from release to release, or JSON since 2.28.7. Both are treated as
anybody's: only what has the documented form is taken. Source: NVIDIA's user guide, "RAS", and
`src/ras/client_support.cc` of NCCL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RANKS_LIMIT = 4096
"""Ranks that are read of an answer."""
COMMUNICATORS_LIMIT = 256
NAME_LIMIT = 80
_OPERATION = re.compile(r"[A-Za-z]{2,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RasRank:
    """A rank of a communicator; `counts` has its collectives so far by NCCL's name.

    A rank that RAS misses has none; `dead` says that RAS has given it up, which takes it a minute.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    missing: bool = False
    dead: bool = False
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator:
    """One communicator; `size` is the number of its ranks, None where it is not told."""

    name: str
    size: int | None = None
    ranks: tuple[RasRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """An answer; `timeouts` is how many processes did not answer RAS in time."""

    version: str = ""
    communicators: tuple[RasCommunicator, ...] = ()
    timeouts: int = 0

    @property
    def missing(self) -> tuple[RasRank, ...]:
        """The ranks that RAS misses, of all communicators, each process once."""
        found = {
            (rank.host, rank.pid, rank.rank if rank.pid is None else None): rank
            for one in self.communicators
            for rank in one.ranks
            if rank.missing
        }
        return tuple(found.values())


def behind(report: RasReport) -> list[tuple[RasCommunicator, RasRank, str, int]]:
    """Return the ranks that have launched fewer collectives of a type than others.

    With each its communicator, the type, and the highest count. A count that differs while a job
    runs means nothing: ask only about one that stands still.
    """
    found = []
    for one in report.communicators:
        kinds = sorted({kind for rank in one.ranks for kind in rank.counts})
        for kind in kinds:
            counts = [rank.counts[kind] for rank in one.ranks if kind in rank.counts]
            most = max(counts)
            found += [
                (one, rank, kind, most) for rank in one.ranks if rank.counts.get(kind, most) < most
            ]
    return found


def parse(text: str) -> RasReport:
    """Return what an answer says. Raises ValueError for what is none of RAS."""
    if text.lstrip().startswith("{"):
        return _of_json(text)
    if "Job summary" not in text and "Communicators" not in text:
        raise ValueError("must be an answer of NCCL RAS, got another text")
    return _of_text(text)


def _of_json(text: str) -> RasReport:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON ({str(error)[:80]})") from None
    if not isinstance(told, dict) or not isinstance(told.get("communicators"), list):
        raise ValueError("must have a list of communicators")
    ras = told.get("ras")
    return RasReport(
        version=_name(told.get("nccl_version")),
        communicators=tuple(map(_communicator, _objects(told["communicators"]))),
        timeouts=_number(ras.get("timeouts_count")) or 0 if isinstance(ras, dict) else 0,
    )


def _communicator(told: Mapping[str, Any]) -> RasCommunicator:
    here = (_rank(one, missing=False) for one in _objects(told.get("ranks")))
    away = (_rank(one, missing=True) for one in _objects(told.get("missing_ranks")))
    ranks = [rank for rank in (*here, *away) if rank is not None]
    name, size = _name(told.get("hash")), _number(told.get("size"))
    return RasCommunicator(name=name, size=size, ranks=tuple(ranks[:RANKS_LIMIT]))


def _rank(told: Mapping[str, Any], *, missing: bool) -> RasRank | None:
    number = _number(told.get("rank"))
    if number is None:
        return None
    status, counts = told.get("status"), told.get("collective_counts")
    given = counts.items() if isinstance(counts, dict) else ()
    known = {
        key: count
        for key, value in list(given)[:20]
        if _OPERATION.fullmatch(key) and (count := _number(value)) is not None
    }
    return RasRank(
        rank=number,
        host=_name(told.get("host")),
        pid=_number(told.get("pid")),
        missing=missing,
        dead=isinstance(status, dict) and status.get("considered_dead") is True,
        counts=known,
    )


_COMMUNICATOR = re.compile(r"#(\d+-\d+) \(([0-9a-f]{1,16})\) ([A-Z]+)")
_KIND = re.compile(r"Communicator ranks have different ([A-Za-z]+) operation counts")
_MEMBER = re.compile(
    r"Rank (\d+)(?: has (?:launched up to operation (\d+)|(not) launched any operations))?"
    r" -- (?:GPU \S+ managed by process (\d+) on node (\S+)|\[process information not found\])"
)
_GROUP = re.compile(r"\d+ ranks? ha(?:ve|s) (?:launched up to operation (\d+)|(not) launched any)")
_MISSING = re.compile(r"The missing ranks?: ([\d, ]+)")
_GONE = re.compile(r"Process (\d+) on node (\S+) managing GPUs? ")
_TIMEOUTS = re.compile(r"Encountered (\d+) communication timeout")
_VERSION = re.compile(r"NCCL version (\S+)")


class _Text:
    """Reads an answer for people line by line; ranks that it does not name are not known."""

    def __init__(self) -> None:
        self.communicators: dict[str, dict[int, RasRank]] = {}
        self.lost: list[RasRank] = []
        self.timeouts = 0
        self.version = ""
        self._part = ""
        """DEAD and the like, or the name of a communicator with the word behind it."""
        self._ranks: dict[int, RasRank] | None = None
        self._kind: str | None = None
        self._count: int | None = None

    def line(self, line: str) -> None:
        """Take the next line."""
        if line in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            self._part, self._ranks = line, None
        elif found := _COMMUNICATOR.match(line):
            self._part, self._kind, self._count = found[3], None, None
            self._ranks = self.communicators.setdefault(found[1], {})
        elif found := _VERSION.match(line):
            self.version = found[1][:NAME_LIMIT]
        elif found := _TIMEOUTS.match(line):
            self.timeouts = int(found[1][:6])
        elif self._ranks is None:
            self._process(line)
        else:
            self._member(line, self._ranks)

    def _process(self, line: str) -> None:
        found = _GONE.match(line)
        if found and self._part in ("DEAD", "INCOMPLETE"):
            pid, host, dead = int(found[1][:10]), found[2][:NAME_LIMIT], self._part == "DEAD"
            self.lost.append(RasRank(rank=-1, pid=pid, host=host, missing=True, dead=dead))

    def _member(self, line: str, ranks: dict[int, RasRank]) -> None:
        if found := _KIND.match(line):
            self._kind = found[1]
        elif found := _GROUP.match(line):
            self._count = 0 if found[2] else int(found[1][:18])
        elif found := _MISSING.match(line):
            for text in found[1].split(",")[:RANKS_LIMIT]:
                if text.strip().isdecimal():
                    number = int(text.strip()[:9])
                    ranks[number] = RasRank(rank=number, missing=True)
        elif (found := _MEMBER.match(line)) and len(ranks) < RANKS_LIMIT:
            self._named(found, ranks)

    def _named(self, found: re.Match[str], ranks: dict[int, RasRank]) -> None:
        number = int(found[1][:9])
        missing = self._part == "INCOMPLETE"
        known = ranks.get(number) or RasRank(rank=number, missing=missing)
        count = int(found[2][:18]) if found[2] else 0 if found[3] else self._count
        counts = dict(known.counts)
        if self._kind is not None and count is not None:
            counts[self._kind] = count
        ranks[number] = RasRank(
            rank=number,
            host=(found[5] or "")[:NAME_LIMIT],
            pid=int(found[4][:10]) if found[4] else None,
            missing=missing,
            counts=counts,
        )


def _of_text(text: str) -> RasReport:
    read = _Text()
    for line in text.splitlines()[: 4 * RANKS_LIMIT]:
        read.line(line.strip()[:500])
    parts = list(read.communicators.items())[:COMMUNICATORS_LIMIT]
    communicators = [
        RasCommunicator(name=name, ranks=tuple(ranks.values())) for name, ranks in parts
    ]
    if read.lost:
        communicators.append(RasCommunicator(name="", ranks=tuple(read.lost[:RANKS_LIMIT])))
    return RasReport(
        version=read.version, communicators=tuple(communicators), timeouts=read.timeouts
    )


def _objects(told: Any) -> Iterator[Mapping[str, Any]]:
    for one in told[:RANKS_LIMIT] if isinstance(told, list) else ():
        if isinstance(one, dict):
            yield one


def _number(told: Any) -> int | None:
    return told if type(told) is int and 0 <= told < 2**63 else None


def _name(told: Any) -> str:
    text = str(told) if isinstance(told, str | int) else ""
    return "".join(letter for letter in text if letter.isprintable())[:NAME_LIMIT]
