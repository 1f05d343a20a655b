"""Commands at a step boundary: what each does, says and refuses."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from torch import nn

from stepscope.recorder import CommandName, Recorder
from stepscope.run import RunStatus
from tests.fakes import FakeRecorder, command
from trainer.checkpoint import read_checkpoint
from trainer.commands import Commands, RunStopped, binary, empty_cache_text, reset_peaks_text
from trainer.compute import CpuCompute
from trainer.config import RunConfig
from trainer.training import Training


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
        training = Training(RunConfig(), nn.Linear(1, 1), CpuCompute())
        training.step = 12
        self.commands = Commands(
            cast("Recorder", self.recorder),
            training,
            stop=self.stop,
            reset_process_peak=lambda: (3 * 2**30, 2**30),
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(FakeRecorder(tmp_path))


def test_without_a_command_nothing_happens(bench: Bench) -> None:
    assert bench.serve() == 0.0
    assert bench.flushed == 0
    assert bench.recorder.events == []


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
    assert bench.flushed == 1


def test_resume_of_a_running_run_is_refused(bench: Bench) -> None:
    bench.serve(CommandName.RESUME)
    assert bench.recorder.events[0][2]["ok"] is False


def test_stop_and_the_servers_end_stop_the_run(bench: Bench) -> None:
    with pytest.raises(RunStopped, match="page"):
        bench.serve(CommandName.STOP)
    bench.stop.set()
    with pytest.raises(RunStopped, match="server"):
        bench.serve()


def test_the_servers_end_reaches_a_paused_run(bench: Bench) -> None:
    bench.stop.set()
    with pytest.raises(RunStopped, match="server"):
        bench.serve(CommandName.PAUSE)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (CommandName.EMPTY_CACHE, "process/rss"),
        (CommandName.COLLECT_GARBAGE, "process/rss"),
        (CommandName.RESET_PEAKS, "process/peak_rss"),
    ],
)
def test_memory_commands_leave_the_numbers(bench: Bench, name: CommandName, key: str) -> None:
    bench.serve(name)
    kind, text, data = bench.recorder.events[0]
    assert kind == name
    assert "→" in text
    assert data["before"][key] > 0
    assert data["after"][key] > 0


def test_a_saved_checkpoint_can_be_read(bench: Bench, tmp_path: Path) -> None:
    bench.serve(CommandName.SAVE_CHECKPOINT)
    assert bench.recorder.events[0][2]["path"] == "step-12.pt"
    assert read_checkpoint(tmp_path / "step-12.pt")["position"]["step"] == 12


def test_a_checkpoint_that_the_disk_refuses_does_not_end_the_run(bench: Bench) -> None:
    bench.recorder.folder = bench.recorder.folder / "missing"
    bench.serve(CommandName.SAVE_CHECKPOINT)
    assert bench.recorder.events[0][2]["ok"] is False
    assert "Training goes on" in bench.recorder.events[0][1]


def test_a_mark_keeps_its_text_within_bounds(bench: Bench) -> None:
    bench.serve(CommandName.MARK, text=" x" * 500)
    bench.serve(CommandName.MARK)
    assert [len(text) for _, text, _ in bench.recorder.events] == [200, 4]


def test_empty_cache_says_what_stays() -> None:
    before = {"memory/reserved": 2.1 * 2**30, "memory/allocated": 0.5 * 2**30}
    after = {"memory/reserved": 0.75 * 2**30, "memory/allocated": 0.5 * 2**30}
    assert empty_cache_text(before, after) == (
        "Empty cache: reserved 2.10 GiB → 768.00 MiB; 768.00 MiB stay: 512.00 MiB are tensors "
        "in use, 256.00 MiB free parts of blocks in use (fragmentation)"
    )
    nothing = {"memory/reserved": 0, "memory/allocated": 0}
    assert empty_cache_text(before, nothing).endswith("→ 0 B; nothing stays")
    assert "no CUDA cache" in empty_cache_text({"process/rss": 1}, {"process/rss": 1})


def test_reset_peaks_names_its_window() -> None:
    before = {"memory/peak_allocated": 2**31, "memory/peak_reserved": 2**32}
    after = {"memory/peak_allocated": 2**30, "memory/peak_reserved": 2**31}
    text = reset_peaks_text(before, after)
    assert "peak allocated 2.00 GiB → 1.00 GiB" in text
    assert "peak reserved 4.00 GiB → 2.00 GiB" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 2**40, "5120.00 GiB")],
)
def test_bytes_in_binary_units(size: int, text: str) -> None:
    assert binary(size) == text
