"""Commands at a step boundary: what each does, says and refuses."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from stepscope.run import RunStatus
from stepscope.session.command_server import CommandServer
from stepscope.session.sampler import Sampler
from stepscope.store.recorder import CommandName, Recorder
from tests.support.fake_recorder import FakeRecorder, command
from trainer.config import RunConfig
from trainer.training.accelerator import CpuAccelerator
from trainer.training.commands import RunStoppedError, TrainerCommands
from trainer.training.state import TrainState


@dataclass
class Bench:
    """Commands over a tiny model."""

    recorder: FakeRecorder
    stop: threading.Event = field(default_factory=threading.Event)
    flushed: int = 0

    def serve(self, *asked: CommandName, **args: str) -> float:
        self.recorder.asked = [command(name, **args) for name in asked]
        return self.commands.serve(self.flush)

    def flush(self) -> None:
        self.flushed += 1

    def __post_init__(self) -> None:
        training = TrainState(RunConfig(), nn.Linear(1, 1), CpuAccelerator())
        training.step = 12
        recorder = cast("Recorder", self.recorder)
        own = TrainerCommands(recorder, training, self.stop, lambda training: None)
        sampler = Sampler(recorder, allocator_index=None)
        self.commands = CommandServer(recorder, sampler, own.handlers, check=own.check)

    def train(self, *steps: int) -> None:
        """Reach the boundary of each step."""
        for step in steps:
            self.recorder.step = step
            self.commands.serve(self.flush)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(FakeRecorder(tmp_path))


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> History:
    return History(monkeypatch)


def test_pause_serves_commands_until_resume(bench: Bench) -> None:
    bench.recorder.while_paused = [
        command(CommandName.MARK, text="here"),
        command(CommandName.PAUSE),
        command(CommandName.RESUME),
    ]
    assert bench.serve(CommandName.PAUSE) > 0
    kinds = [(kind, data["ok"]) for kind, _, data in bench.recorder.events]
    assert kinds == [("pause", True), ("mark", True), ("pause", False), ("resume", True)]
    assert bench.recorder.statuses == [RunStatus.PAUSED, RunStatus.RUNNING]
    assert bench.flushed == 4, "before each command"
    bench.serve(CommandName.RESUME)
    assert bench.recorder.events[-1][2]["ok"] is False, "it runs already"


def test_stop_and_the_servers_end_stop_the_run(bench: Bench) -> None:
    with pytest.raises(RunStoppedError, match="page"):
        bench.serve(CommandName.STOP)
    bench.stop.set()
    for asked in ([], [CommandName.PAUSE]):
        with pytest.raises(RunStoppedError, match="server"):
            bench.serve(*asked)
    assert bench.recorder.statuses == [RunStatus.PAUSED, RunStatus.RUNNING]


def test_a_mark_is_short_and_a_cpu_run_has_no_snapshot(bench: Bench) -> None:
    bench.serve(CommandName.MARK, text=" x" * 500)
    bench.serve(CommandName.MARK)
    bench.serve(CommandName.MEMORY_SNAPSHOT)
    assert [len(text) for _, text, _ in bench.recorder.events[:2]] == [200, 4]
    assert bench.recorder.events[2][2] == {"ok": False}, "a CPU run has no allocator"
    assert CommandName.MEMORY_SNAPSHOT not in bench.commands.supported_commands()


def test_a_command_that_fails_is_refused_and_training_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("CUDA error: the launch timed out")

    monkeypatch.setattr(bench.commands, "read_memory", broken)
    assert bench.serve(CommandName.EMPTY_CACHE) > 0
    refused = "Empty cache: failed (RuntimeError: CUDA error: the launch timed out)"
    assert bench.recorder.events == [("empty_cache", refused, {"ok": False})]


class History:
    """Stands for torch's history of allocations; fair as to calls and their order, no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, running: bool = False) -> None:
        self.calls: list[object] = []
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", self.record)
        monkeypatch.setattr(memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: running, raising=False)
        monkeypatch.setattr(CommandServer, "on_gpu", True)
        monkeypatch.setattr(CommandServer, "read_memory", lambda server: {})

    def record(self, enabled: str | None = "all", **options: object) -> None:
        self.calls.append(("record", enabled, options.get("max_entries")))

    def dump(self, path: str) -> None:
        self.calls.append("dump")
        Path(path).write_bytes(b"history")


def test_a_snapshot_that_cannot_be_written_whole_leaves_no_file(
    bench: Bench, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(path: str) -> None:
        history.dump(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fill_the_disk)
    bench.serve(CommandName.MEMORY_SNAPSHOT)
    bench.train(1)
    assert history.calls[1:] == ["dump", ("record", None, None)]
    assert not [path for path in bench.recorder.folder.iterdir() if "snapshot" in path.name]
    [(_, text, data)] = bench.recorder.events
    assert "No space left on device" in text
    assert data["ok"] is False


@pytest.mark.parametrize("steps", [1, 3])
def test_a_snapshot_covers_the_requested_whole_steps(
    bench: Bench, history: History, steps: int
) -> None:
    bench.recorder.asked = [command(CommandName.MEMORY_SNAPSHOT, steps=steps)]
    bench.train(12, *range(12, 12 + steps))  # one boundary without a step, as in validation
    assert history.calls == [("record", "all", 100_000)]
    assert bench.recorder.boundaries_wanted == 1 + steps, "one after each step"
    bench.train(12 + steps)
    assert history.calls == [("record", "all", 100_000), "dump", ("record", None, None)]
    [(kind, _, data)] = bench.recorder.events
    name = f"snapshot-step-{12 + steps}.pickle"
    assert (kind, data["path"], data["bytes"]) == ("memory_snapshot", name, 7)
    assert (data["first"], data["last"]) == (13, 12 + steps)
    assert bench.commands.serve(bench.flush) == 0.0


@pytest.mark.parametrize("steps", [0, 51, True, "5"])
def test_a_snapshot_of_another_number_of_steps_is_refused(
    bench: Bench, history: History, steps: object
) -> None:
    bench.recorder.asked = [command(CommandName.MEMORY_SNAPSHOT, steps=steps)]
    bench.commands.serve(bench.flush)
    [(_, text, data)] = bench.recorder.events
    assert "steps must be a whole number from 1 to 50, got" in text
    assert (data["ok"], history.calls) == (False, [])


def test_a_run_that_ends_within_the_step_keeps_what_there_is(
    bench: Bench, history: History
) -> None:
    bench.serve(CommandName.MEMORY_SNAPSHOT)
    bench.commands.close()
    bench.commands.close()
    assert history.calls[1:] == ["dump", ("record", None, None)]
