"""Live memory over the recorded actions, held against a plain replay."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.memory.snapshots import timeline as histories
from stepscope.memory.snapshots.load import load
from stepscope.memory.snapshots.summary import SnapshotSummary, summarize
from stepscope.memory.snapshots.timeline import MemoryTimeline
from tests.support.snapshots import ADDRESS, Json, action, live_block, segment, snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def summary_of(path: Path, content: Json) -> SnapshotSummary:
    path.write_bytes(pickle.dumps(content))
    return summarize(load(path))


def history_of(path: Path, content: Json) -> MemoryTimeline:
    [found] = summary_of(path, content).histories
    return found


def test_allocations_live_until_the_first_free_of_their_address(path: Path) -> None:
    trace = [
        action("alloc", 512, 100),
        action("alloc", 1024, 50, line=8),
        action("free_requested", 512, 100),
        action("free_completed", 512, 100),
        action("alloc", 512, 30, line=9),
        action("free_completed", 1024, 50),
    ]
    found = history_of(path, snapshot([], trace))
    assert found.live == (100, 150, 50, 50, 80, 30)
    assert (found.peak, found.peak_column, found.end) == (150, 1, 30)
    assert [band.live for band in found.bands] == [(100, 100, 0, 0, 0, 0), (0, 50, 50, 50, 50, 0)]
    assert found.rest == (0, 0, 0, 0, 30, 30)
    assert [(held.size, held.count) for held in found.at_peak] == [(100, 1), (50, 1)]


def test_reserved_is_reckoned_back_from_the_end(path: Path) -> None:
    trace = [
        action("segment_alloc", ADDRESS, 1000),
        action("alloc", ADDRESS, 10),
        action("segment_map", ADDRESS + 5000, 300),
        action("segment_free", 9, 200),
    ]
    found = history_of(path, snapshot([live_block(1100)], trace))
    assert found.reserved == (1000, 1000, 1300, 1100)


def test_a_failed_allocation_and_labels_have_their_columns(path: Path) -> None:
    labeled = {"user_metadata": "phase=forward"}
    trace = [
        action("alloc", 512, 1),
        action("alloc", 1024, 1, **labeled),
        action("free_completed", 512, 1),
        action("alloc", 1536, 1, **labeled),
        {"action": "oom", "size": 9, "device_free": 5, "frames": []},
        action("alloc", 2048, 1),
    ]
    found = summary_of(path, snapshot([], trace))
    [history] = found.histories
    assert history.ooms == (4,)
    assert [(span.first, span.last, found.labels[span.label]) for span in history.spans] == [
        (1, 4, "phase=forward")
    ]
    assert [(one.device, one.requested, one.device_free) for one in found.failed] == [(0, 9, 5)]


def test_seconds_never_run_backwards(path: Path) -> None:
    trace = [action("alloc", 512 * n, 1, time_us=at) for n, at in enumerate([0, 50, 40, 2_000_000])]
    assert history_of(path, snapshot([], trace)).seconds == (0.0, 5e-05, 5e-05, 2.0)


def test_a_long_history_keeps_its_peak_in_bounded_columns(path: Path) -> None:
    trace = []
    for number in range(6000):
        size = 2**30 if number == 3456 else 10
        trace += [action("alloc", 512, size), action("free_requested", 512, size)]
    found = history_of(path, snapshot([], trace))
    assert found.actions == 12_000
    assert len(found.columns) == histories.COLUMNS
    assert found.peak == max(found.live) == 2**30
    assert found.columns[found.peak_column] == 2 * 3456


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "free_requested", "free_completed"]),
        st.integers(1, 6),
        st.integers(1, 1000),
        st.integers(1, 14),
    ),
    min_size=1,
    max_size=60,
)


def replay(events: list[tuple[str, int, int, int]]) -> tuple[int, list[int]]:
    """Return the bytes live before, and those live after each event: simple, and slow."""
    touched: set[int] = set()
    before = 0
    for name, place, size, _ in events:
        if place not in touched and name != "alloc":
            before += size
        touched.add(place)
    live: dict[int, int] = {}
    unknown, after, touched = before, [], set()
    for name, place, size, _ in events:
        if name == "alloc":
            live[place] = size
        elif place in live:
            del live[place]
        elif place not in touched:
            unknown -= size
        touched.add(place)
        after.append(unknown + sum(live.values()))
    return before, after


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, kept=st.integers(0, 500))
def test_columns_are_what_a_replay_finds_and_bands_sum_to_them(
    path: Path, events: list[tuple[str, int, int, int]], kept: int
) -> None:
    trace: list[Any] = [action(name, 512 * at, size, line=n) for name, at, size, n in events]
    blocks = [live_block(kept, address=ADDRESS)] if kept else []
    found = history_of(path, {"segments": [segment(blocks)], "device_traces": [trace]})
    _, after = replay(events)
    assert found.live == tuple(size + kept for size in after)
    assert len(found.bands) <= histories.BANDS
    for column, live in enumerate(found.live):
        parts = [found.before[column], found.rest[column]]
        parts += [band.live[column] for band in found.bands]
        assert sum(parts) == live
        assert min(parts) >= 0
