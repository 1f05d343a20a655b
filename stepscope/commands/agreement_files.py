"""The files in which the ranks of a job agree: each process replaces its own, the others read it.

`agreement/notices.json` is number 0's, `agreement/answers/rankK.json` that of each other rank. In
two folders, so that an answer wakes number 0 alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.commands.command import Command, CommandName
from stepscope.commands.consensus import Notice, State
from stepscope.common.files import atomic_write, read_regular_file

FOLDER = "agreement"
NOTICES = "notices.json"
BYTES_LIMIT = 2**20


@dataclass(slots=True)
class Said:
    """What a rank says: its answers, by the id of a command; the steps where it has taken commands;
    what came of those that it has ended: `ok`, and bytes `before` and `after` by metric; and why it
    wants all ranks to stop."""

    answers: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    stop: str | None = None


class AgreementFiles:
    """The files of one job, as one of its ranks sees them. Raises OSError."""

    def __init__(self, run_folder: Path, number: int) -> None:
        self._notices = run_folder / FOLDER / NOTICES
        self._answers = run_folder / FOLDER / "answers"
        self._answers.mkdir(parents=True, exist_ok=True)
        self._own = self._path(number)
        self.watched = self._answers if number == 0 else self._notices.parent
        """The folder where others replace what this rank has to read."""
        self._known: dict[Path, tuple[bytes, Any]] = {}

    def write_notices(self, notices: Sequence[Notice]) -> None:
        """Say what is proposed, decided and withdrawn; number 0 alone."""
        _write(self._notices, [_form(notice) for notice in notices])

    def notices(self) -> list[Notice]:
        """Return what number 0 says; nothing before it has said anything."""
        found: list[Notice] = self._read(self._notices, lambda content: list(map(_notice, content)))
        return found or []

    def write_said(self, said: Said) -> None:
        """Say what this rank answers and has done."""
        # Not asdict: the training thread may add an entry while it copies.
        names = ("answers", "taken", "results", "stop")
        _write(self._own, {name: getattr(said, name) for name in names})

    def said(self, number: int) -> Said:
        """Return what a rank says; nothing before it has said anything."""
        found: Said | None = self._read(self._path(number), _said)
        return found or Said()

    def _path(self, number: int) -> Path:
        return self._answers / f"rank{number}.json"

    def _read(self, path: Path, parse: Any) -> Any:
        """Return the content, parsed again where it has changed; None without a file.

        The bytes tell, not inode and time: ext4 gives the inode to the next file but one, and the
        time may go in ticks of 4 ms. Reading costs 10 us, and only while a command is under way.
        """
        try:
            content, known = read_regular_file(path, BYTES_LIMIT), self._known.get(path)
            if known is None or known[0] != content:
                known = self._known[path] = (content, parse(json.loads(content)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # none yet, or replaced on a network disk while it was read
        return known[1]


def _write(path: Path, content: Any) -> None:
    # Not durable: a power failure ends the processes that would read it.
    atomic_write(path, json.dumps(content), durable=False)


def _form(notice: Notice) -> dict[str, Any]:
    command = notice.command
    return {
        "id": command.id,
        "name": command.name,
        "args": command.args,
        "state": notice.state,
        "step": notice.step,
        "why": notice.why,
    }


def _notice(form: Mapping[str, Any]) -> Notice:
    command = Command(int(form["id"]), CommandName(form["name"]), dict(form["args"]))
    return Notice(command, State(form["state"]), form["step"], form["why"])


def _said(content: Mapping[str, Any]) -> Said:
    answers, taken, results = (_by_id(content[key]) for key in ("answers", "taken", "results"))
    return Said(answers, taken, results, content["stop"])


def _by_id(entries: Mapping[str, Any]) -> dict[int, Any]:
    return {int(id_): entry for id_, entry in entries.items()}
