"""Memory snapshots of real allocators: of a script, of a training; and opened again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepscope.memory.snapshots.open_snapshot import open_snapshot
from stepscope.recorder.recorder import CommandName
from stepscope.store import StoreError, StoreReader
from stepscope.store.reader import send_command
from trainer.config import RunConfig
from trainer.devices import list_devices
from trainer.runners import start

STEPS = 3
PATIENCE_S = 60.0
Counted = dict[str, int]


def counted() -> Counted:
    """Return what torch itself counts now."""
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "requested": stats["requested_bytes.all.current"],
        "split": stats["inactive_split_bytes.all.current"],
        "peak": stats["requested_bytes.all.peak"],
    }


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
    seen: list[Counted] = []
    dump = torch.cuda.memory._dump_snapshot

    def dump_and_count(path: str) -> None:
        dump(path)
        seen.append(counted())

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

    found = open_snapshot(active.folder / event["path"], tmp_path)
    [memory] = found.devices
    parts = memory.parts
    assert (parts.allocated, parts.reserved) == (at_end["allocated"], at_end["reserved"])
    assert (memory.requested, parts.split) == (at_end["requested"], at_end["split"])
    [history] = found.histories
    assert history.end == at_end["requested"]
    assert max(history.before) <= history.peak
    assert history.peak >= history.end
    # Parameters and the optimizer's state are older than the recording.
    assert history.before[0] > 0
    assert {label.removeprefix("phase=") for label in found.labels} >= {"forward", "backward"}
    assert sum(site.size for site in found.sites) == at_end["allocated"]
    assert any(frame for band in history.bands for frame in found.frames(band.stack))
    assert any(found.module(stack) for stack in found.stacks)


@pytest.mark.usefixtures("clean")
def test_an_allocation_that_failed_is_in_the_history(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(context="all", stacks="python", max_entries=1000)
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    path = tmp_path / "oom.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    found = open_snapshot(path, tmp_path)
    assert any(failed.requested >= 2 * total for failed in found.failed)
    assert all(0 <= (failed.device_free or 0) <= total for failed in found.failed)
    assert found.histories[0].ooms


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
