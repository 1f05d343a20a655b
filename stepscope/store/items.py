"""What goes to the writer thread besides rows of steps, and who hears of all that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepscope.store import Block

Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the samples or devices stream."""

    stream: str
    source: str
    ts: float
    step: int
    values: Values


@dataclass(frozen=True, slots=True)
class Event:
    """A marker."""

    ts: float
    step: int
    epoch: int
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    command_id: int
    state: str
    ts: float
    result: str


Item = Sample | Event | Ended


class Observer(Protocol):
    """Hears of all that is stored, in the writer's thread, and may add events to it."""

    def saw(self, block: Block, items: Sequence[Item]) -> None:
        """Take in rows of steps and other items that are in the store now."""

    def look(
        self, run_json: Mapping[str, Any], step: int
    ) -> Sequence[tuple[str, str, dict[str, Any]]]:
        """Return the events to write, as kind, text and data; asked about once a second."""
