"""Runs that are read from the bytes are the same as what Python's own unpickler makes of them."""

from __future__ import annotations

import contextlib
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.snapshot_file import write_snapshot
from stepscope.memory.snapshots import load as loading
from stepscope.memory.snapshots import pickle_loader
from stepscope.memory.snapshots import pickle_loader as unpickling
from stepscope.memory.snapshots.load import Snapshot, SnapshotError, load
from stepscope.memory.snapshots.pickle_loader import Regular
from stepscope.memory.snapshots.stacks import NO_STACK
from stepscope.memory.snapshots.summary import summarize
from tests.support.snapshots import REAL, Json, action, frame, live_block, snapshot

COLUMNS = ("action", "address", "size", "time_us")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> list[Regular]:
    """What is cut out of the files that are loaded; chunks are small."""
    made: list[Regular] = []

    class Kept(Regular):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(loading, "Regular", Kept)
    return made


def plain(path: Path) -> Snapshot:
    """Load without cutting anything out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "Regular", lambda: None)
        return load(path)


def labels(found: Snapshot, device: int) -> list[str | None]:
    """Return the label of each row."""
    names = [*found.labels.names, None]
    return [names[place] for place in found.traces[device].phase.tolist()]


def held_equal(path: Path) -> Snapshot:
    """Return the snapshot, after holding every row against what the plain reading finds."""
    found, wanted = load(path), plain(path)
    assert list(found.traces) == list(wanted.traces)
    for device, trace in wanted.traces.items():
        other = found.traces[device]
        for column in COLUMNS:
            assert getattr(other, column).tolist() == getattr(trace, column).tolist(), column
        assert labels(found, device) == labels(wanted, device)
        stacks = [wanted.stacks.text(number) for number in trace.stack.tolist()]
        assert [found.stacks.text(number) for number in other.stack.tolist()] == stacks
        assert (other.ooms, other.unreadable) == (trace.ooms, trace.unreadable)
    assert sorted(found.labels.names) == sorted(wanted.labels.names)
    first, second = summarize(found), summarize(wanted)
    assert [one.parts for one in first.devices] == [one.parts for one in second.devices]
    assert [one.live for one in first.histories] == [one.live for one in second.histories]
    assert [(site.size, first.frames(site.stack)) for site in first.sites] == [
        (site.size, second.frames(site.stack)) for site in second.sites
    ]
    return found


@pytest.mark.parametrize("chunk", [700, 10_000, 2**20])
def test_a_generated_history_is_cut_out_nearly_whole(
    path: Path, cut: list[Regular], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(unpickling, "CHUNK", chunk)
    actions = write_snapshot(path, 400_000)
    found = held_equal(path)
    assert (
        len(found.traces[0]) == actions == len(pickle.loads(path.read_bytes())["device_traces"][0])
    )
    assert sum(cut[0].lengths) > 0.8 * actions


def entries(count: int, seed: int, **more: Any) -> list[Json]:
    """Return a history as torch makes one: frees share a list, the frames are shared by all."""
    chance = random.Random(seed)
    frames = [frame(line) for line in range(1, 30)]
    made: list[Json] = []
    for number in range(count):
        address = 512 * chance.randint(1, 2 ** chance.randint(1, 40))
        size = chance.randint(0, 2 ** chance.randint(1, 40))
        first = [chance.choice(frames) for _ in range(chance.randint(0, 6))]
        common = {"time_us": chance.randint(0, 2**50), "pool_id": (0, 0), "frames": first} | more
        common["compile_context"] = "".join(["N", "/A"])  # an object of its own, as torch makes it
        phase = chance.choice(["forward", "backward", "an optimizer with a long name"])
        label = chance.choice(["", "", "shared", f"phase={phase}"])
        made.append(action("segment_alloc", address, size) | common)
        made.append(action("alloc", address, size, user_metadata=label) | common)
        if chance.random() < 0.02:
            made.append({"action": "oom", "size": size, "device_free": 5, "frames": first})
        last = {"frames": [chance.choice(frames)] * chance.randint(0, 2)}
        made.append(action("free_requested", address, size) | common | last)
        made.append(action("free_completed", address, size) | common | last)
        if chance.random() < 0.02:
            made.append(action(f"new {number}", address, size) | common)
    return made


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    chunk=st.integers(50, 60_000),
    protocol=st.sampled_from([4, 5]),
)
def test_any_history_is_read_as_python_reads_it(
    path: Path, seed: int, counts: list[int], chunk: int, protocol: int
) -> None:
    traces = [entries(count, seed + device) for device, count in enumerate(counts)]
    shared = traces[0][-1]["frames"] if traces[0] else []
    content = snapshot([live_block(64, frames=shared), live_block(8)], *traces)
    path.write_bytes(pickle.dumps(content, protocol))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpickling, "CHUNK", chunk)
        held_equal(path)


def test_too_many_stacks_are_left_to_python(
    path: Path, cut: list[Regular], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_loader, "STACKS_LIMIT", 20)
    path.write_bytes(pickle.dumps(snapshot([], entries(300, 1))))
    held_equal(path)
    assert len(cut[0].stacks) == 20
    assert 0 < sum(cut[0].lengths) < 1200


def test_a_real_history_has_the_form(cut: list[Regular]) -> None:
    held_equal(REAL)
    assert sum(cut[0].lengths) > 300


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), seed=st.integers(0, 5))
def test_a_broken_run_is_read_or_refused(path: Path, data: st.DataObject, seed: int) -> None:
    broken = bytearray(pickle.dumps(snapshot([live_block(8)], entries(80, seed))))
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3)) or b"u"
    path.write_bytes(bytes(broken))
    with contextlib.suppress(SnapshotError):
        summarize(load(path))


def test_most_of_such_a_history_is_cut_out(path: Path, cut: list[Regular]) -> None:
    made = entries(1000, 3)
    path.write_bytes(pickle.dumps(snapshot([], made)))
    load(path)
    assert sum(cut[0].lengths) > 0.9 * len(made)


def test_an_older_protocol_has_no_frames_and_is_read_whole(path: Path, cut: list[Regular]) -> None:
    path.write_bytes(pickle.dumps(snapshot([], entries(300, 1)), 2))
    held_equal(path)
    assert cut[0].lengths == []


def test_what_follows_a_large_text_is_read_too(path: Path) -> None:
    """Python's pickler writes it outside of the frames."""
    content = {"note": "x" * 200_000} | snapshot([], entries(500, 2)) | {"end": "y" * 200_000}
    path.write_bytes(pickle.dumps(content))
    held_equal(path)


def test_a_list_that_a_block_shares_with_a_run_keeps_its_stack(path: Path) -> None:
    """Here the blocks come behind the history."""
    made = entries(300, 5)
    frames = next(one["frames"] for one in reversed(made) if one["action"] == "segment_alloc")
    content = {
        "device_traces": [made],
        "segments": snapshot([live_block(8, frames=frames)])["segments"],
    }
    path.write_bytes(pickle.dumps(content))
    found = summarize(load(path))
    wanted = tuple(f"/me/net.py:{one['line']} in forward" for one in frames)
    assert [found.frames(site.stack) for site in found.sites] == [wanted]


def test_dicts_of_the_same_form_that_are_no_actions_are_read_by_python(
    path: Path, cut: list[Regular]
) -> None:
    """The word "action" stands somewhere, and what follows is regular, but no history."""
    odd = [{"a": number, "b": 2 * number, "c": 0, "d": "x", "frames": []} for number in range(900)]
    content = {"x": "action", "odd": odd, "segments": [], "device_traces": [[{"action": 3}, *odd]]}
    path.write_bytes(pickle.dumps(content))
    trace = load(path).traces[0]
    assert sum(cut[0].lengths) > 0
    assert (len(trace), trace.unreadable) == (0, 1 + len(odd))


def test_numbers_among_the_actions_are_not_taken_for_runs(path: Path) -> None:
    made: list[Any] = entries(200, 5)
    path.write_bytes(pickle.dumps(snapshot([], [5, *made[:100], 0, *made[100:], 1, 2])))
    found = load(path).traces[0]
    assert len(found) == len(made)
    assert found.unreadable == 4
    assert NO_STACK in found.stack.tolist()
