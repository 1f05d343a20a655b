"""Hand-written stand-ins, each with the reason why it is fair."""

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
    is_shared: bool = False
    """True: the run has several ranks."""
    step: int = 0
    epoch: int = 0
    rows: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    statuses: list[RunStatus] = field(default_factory=list)
    asked: list[Command] = field(default_factory=list)
    while_paused: list[Command] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    activity: int = 0
    boundaries_wanted: int = 0

    def log(self, step: int, values: Mapping[str, float | None], ts: float | None = None) -> None:
        self.step = step
        self.rows.append((step, dict(values)))

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


class SampleRecorder(FakeRecorder):
    """Keeps also what the sampler tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[dict[str, float]] = []
        self.devices: list[tuple[str, dict[str, float]]] = []
        self.run_json: list[dict[str, Any]] = []

    def sample(self, values: dict[str, float], gpu: str = "") -> None:
        if gpu:
            self.devices.append((gpu, values))
        else:
            self.samples.append(values)

    def describe(self, **run_info: Any) -> None:
        self.run_json.append(run_info)

    def described(self, name: str) -> list[Any]:
        return [found[name] for found in self.run_json if name in found]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


def command(name: CommandName, **args: Any) -> Command:
    """A command as the page would ask it."""
    return Command(1, name, args)
