"""A recorder without a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.run import RunStatus
from stepscope.store.recorder import Command, CommandName


@dataclass
class FakeRecorder:
    """Keeps in lists what the loop records; fair because the real one only queues and returns.

    `asked` holds the commands of each coming boundary; `while_paused` those of each wait.
    """

    folder: Path = field(default_factory=Path)
    number: int = 0
    step: int = 0
    epoch: int = 0
    rows: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    statuses: list[RunStatus] = field(default_factory=list)
    asked: list[Command] = field(default_factory=list)
    while_paused: list[Command] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, float]] = field(default_factory=list)
    devices: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    run_json: dict[str, Any] = field(default_factory=dict)
    activity: int = 0
    boundaries_wanted: int = 0

    def log(self, step: int, values: Mapping[str, Any], ts: float | None = None) -> None:
        """Keep a row; the real recorder reads tensors of a CPU here, too."""
        self.step = step
        read = {key: None if value is None else float(value) for key, value in values.items()}
        self.rows.append((step, read))

    def sample(self, values: dict[str, float], gpu: str = "") -> None:
        if gpu:
            self.devices.append((gpu, values))
        else:
            self.samples.append(values)

    def describe(self, **run_info: Any) -> None:
        self.descriptions.append(run_info)
        self.run_json |= run_info

    def described(self, name: str) -> list[Any]:
        return [found[name] for found in self.descriptions if name in found]

    def event(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text, data))

    @property
    def waiting(self) -> list[Command]:
        return self.asked

    @property
    def commands(self) -> FakeRecorder:
        return self

    def take(self, *, paused: bool = False) -> Command | None:
        return self.asked.pop(0) if self.asked else None

    def request_boundary(self) -> None:
        self.boundaries_wanted += 1

    def wait(self, timeout_s: float) -> None:
        if self.while_paused:
            self.asked.append(self.while_paused.pop(0))

    def may_leave(self) -> bool:
        return True

    def finish(self, command: Command, text: str, *, ok: bool = True, **data: Any) -> None:
        self.event(command.name, text, ok=ok, **data)

    def set_status(self, status: RunStatus) -> None:
        self.statuses.append(status)


def command(name: CommandName, **args: Any) -> Command:
    """A command as the page would ask it."""
    return Command(1, name, args)
