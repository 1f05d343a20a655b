"""A memory snapshot of a training, recorded by command and opened again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepscope.memory.snapshots.open_snapshot import open_snapshot
from stepscope.store import StoreError, StoreReader
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from trainer.config import RunConfig
from trainer.runners import start
from trainer.training.devices import list_devices

STEPS = 3
PATIENCE_S = 60.0


@pytest.fixture
def clean() -> Iterator[None]:
    """Leave no history on, whatever happens."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.usefixtures("clean")
def test_a_training_of_ours_is_recorded_and_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    dump = torch.cuda.memory._dump_snapshot

    def dump_and_count(path: str) -> None:
        dump(path)
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump_and_count)
    config = RunConfig(workload="digits_cnn", device=list_devices()[0].id, epochs=50)
    active = start(config, tmp_path)
    try:
        wait_for(active.folder, "running")
        send_command(active.folder, CommandName.MEMORY_SNAPSHOT, {"steps": STEPS})
        event = wait_for(active.folder, "memory_snapshot")
    finally:
        assert active.stop(PATIENCE_S)
    assert not torch._C._cuda_isHistoryEnabled()
    [at_end] = seen
    assert event["ok"] is True
    assert event["last"] - event["first"] + 1 == STEPS

    found = open_snapshot(active.folder / event["path"])
    assert (found.allocated, found.reserved) == at_end
    assert sum(stack.size for stack in found.stacks) == found.allocated
    assert any(stack.frames for stack in found.stacks)


def wait_for(folder: Path, what: str) -> dict[str, object]:
    """Wait for an event of a run, or for its first steps; return the event's data."""
    for _ in range(int(PATIENCE_S / 0.05)):
        with contextlib.suppress(StoreError), StoreReader(folder) as reader:
            for event in reader.events():
                if event.kind == what:
                    return dict(event.data)
            if what == "running" and any(one.rows for one in reader.series()):
                return {}
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {PATIENCE_S:.0f} s")
