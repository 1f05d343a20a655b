"""The summary of a snapshot: sites, modules, segments; as a file; and the difference of two."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.memory.snapshots import open_snapshot
from stepscope.memory.snapshots import segments as segment_rows
from stepscope.memory.snapshots.load import load
from stepscope.memory.snapshots.open_snapshot import read_summary, write_summary
from stepscope.memory.snapshots.segments import ACTIVE, FREE, MAX_SIZE
from stepscope.memory.snapshots.stacks import module_of
from stepscope.memory.snapshots.summary import SnapshotSummary, by_module, difference, summarize
from tests.support.snapshots import (
    ADDRESS,
    REAL,
    Json,
    action,
    frame,
    free_block,
    live_block,
    segment,
    snapshot,
)

MIB = 2**20
CALL = frame(1789, "_call_impl", "/venv/site-packages/torch/nn/modules/module.py")
LINEAR = frame(134, "forward", "/venv/site-packages/torch/nn/modules/linear.py")


@pytest.fixture
def real() -> SnapshotSummary:
    return summarize(load(REAL))


def summary_of(tmp_path: Path, content: Json) -> SnapshotSummary:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    return summarize(load(path))


def test_sites_and_modules_are_added_up_over_segments(tmp_path: Path) -> None:
    inside = [LINEAR, CALL, frame(9), frame(3, "step")]
    other = [LINEAR, CALL, frame(12), frame(3, "step")]
    segments = [
        segment([live_block(MIB, frames=inside), live_block(3 * MIB)]),
        segment([live_block(4 * MIB, frames=inside)], ADDRESS + 2**30),
        segment([live_block(2 * MIB, frames=other)], 2 * ADDRESS, device=1, stream=5),
    ]
    found = summary_of(tmp_path, {"segments": segments})
    assert [(site.device, site.size, site.count) for site in found.sites] == [
        (0, 5 * MIB, 2),
        (0, 3 * MIB, 1),
        (1, 2 * MIB, 1),
    ]
    assert [(one.module, one.size) for one in by_module(found)] == [
        ("torch.nn.modules.linear, called at net.py:9", 5 * MIB),
        (None, 3 * MIB),
        ("torch.nn.modules.linear, called at net.py:12", 2 * MIB),
    ]
    assert [one.size for one in by_module(found, 0)] == [5 * MIB, 3 * MIB]
    assert [one.size for one in by_module(found, 1)] == [2 * MIB]
    assert [(place.device, place.stream, place.segments) for place in found.places] == [
        (0, 0, 2),
        (1, 5, 1),
    ]


def test_a_frame_without_a_line_has_a_module() -> None:
    frames = ["net.py in forward", "/v/torch/nn/modules/module.py:1780 in _call_impl"]
    assert module_of(frames) is not None


def test_the_map_has_the_most_split_segments_first_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_rows, "MAX_SEGMENTS", 2)
    many = [live_block(512), free_block(512)] * 2000
    segments = [
        segment([live_block(9 * MIB)]),
        segment(many, ADDRESS + 2**30),
        segment([live_block(MIB), free_block(MIB)], ADDRESS + 2**31),
    ]
    found = summary_of(tmp_path, {"segments": segments})
    [memory] = found.devices
    assert [row.split for row in memory.rows] == [MIB, 1000 * 1024]
    assert memory.segments == 3
    assert [(part.size, part.state) for part in memory.rows[0].parts] == [
        (MIB, ACTIVE),
        (MIB, FREE),
    ]
    parts = memory.rows[1].parts
    assert len(parts) <= 3 * segment_rows.MAX_PARTS
    assert sum(part.size for part in parts) == memory.rows[1].size
    assert sum(part.size for part in parts if part.state == ACTIVE) == memory.rows[1].allocated


def test_a_summary_comes_back_from_its_file_as_it_was(
    tmp_path: Path, real: SnapshotSummary
) -> None:
    path = tmp_path / "a.summary.json.gz"
    write_summary(path, real, 17)
    assert read_summary(path, real.file_size, 17) == real
    assert read_summary(path, real.file_size, 18) is None
    assert read_summary(path, real.file_size + 1, 17) is None
    assert read_summary(tmp_path / "absent", real.file_size, 17) is None
    assert [path] == list(tmp_path.iterdir())
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_summary(link, real.file_size, 17) is None


def test_a_long_number_inside_a_label_is_text(tmp_path: Path, real: SnapshotSummary) -> None:
    labeled = replace(real, labels=("request,18446744073709551615",))
    write_summary(tmp_path / "a", labeled, 17)
    assert read_summary(tmp_path / "a", real.file_size, 17) == labeled


def test_a_summary_that_unpacks_to_too_much_is_neither_read_nor_written(
    tmp_path: Path, real: SnapshotSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.summary.json.gz"
    write_summary(path, real, 17)
    monkeypatch.setattr(open_snapshot, "MAX_BYTES", 1000)
    assert read_summary(path, real.file_size, 17) is None
    monkeypatch.setattr(open_snapshot, "MAX_LISTS", 3)
    for limit, words in ((1000, "at most 1000 bytes"), (2**24, "at most 3 lists")):
        monkeypatch.setattr(open_snapshot, "MAX_BYTES", limit)
        with pytest.raises(ValueError, match=words):
            write_summary(tmp_path / "b", real, 17)
    assert [path] == list(tmp_path.iterdir())


def test_a_summary_never_goes_through_a_link(tmp_path: Path, real: SnapshotSummary) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    path = tmp_path / "a.summary.json.gz"
    (tmp_path / f".{path.name}.{os.getpid()}.part").symlink_to(victim)
    write_summary(path, real, 17)
    assert victim.read_bytes() == b"mine"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_summary(path, real.file_size, 17) == real


@pytest.mark.parametrize("segments", [5, 40])
def test_sizes_that_no_memory_has_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    segments: int,
) -> None:
    monkeypatch.setattr(open_snapshot, "limit_process", lambda **_: None)
    huge = [segment([live_block(MAX_SIZE - 1)]) for _ in range(segments)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": huge}))
    assert open_snapshot.main([str(path), str(tmp_path / "a")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("snapshot.pickle: cannot be summarized (")
    assert [path] == list(tmp_path.iterdir())


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-3, 10**6), max_size=3)
)


def replaced(value: Any, data: st.DataObject) -> Any:
    """Return JSON with one part, anywhere in it, replaced by another."""
    if not isinstance(value, list | dict) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ODD)
    copy = value.copy()
    place = data.draw(st.sampled_from(list(copy) if isinstance(copy, dict) else range(len(copy))))
    copy[place] = replaced(value[place], data)
    return copy


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_foreign_summary_is_read_whole_or_not_at_all(
    tmp_path: Path, real: SnapshotSummary, data: st.DataObject
) -> None:
    path = tmp_path / "a.summary.json.gz"
    if not path.exists():
        write_summary(path, real, 17)
        (tmp_path / "intact.json").write_bytes(gzip.decompress(path.read_bytes()))
    content = json.loads((tmp_path / "intact.json").read_bytes())
    content["summary"] = replaced(content["summary"], data)
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    found = read_summary(path, real.file_size, 17)
    if found is not None:
        for site in found.sites:
            assert all(isinstance(text, str) for text in found.frames(site.stack))
        for history in found.histories:
            assert len(history.columns) == len(history.live)


@pytest.mark.parametrize(
    "data", [b"", b"x", gzip.compress(b"[]", mtime=0), gzip.compress(b"[" * 10**5, mtime=0)]
)
def test_what_is_no_summary_counts_as_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.summary.json.gz"
    path.write_bytes(data)
    assert read_summary(path, 1, 1) is None


def test_the_difference_is_by_stack_whatever_the_addresses(tmp_path: Path) -> None:
    first = summary_of(
        tmp_path, snapshot([live_block(MIB), live_block(MIB, line=8), live_block(5, line=9)])
    )
    blocks = [live_block(MIB), live_block(MIB), live_block(5, line=9), live_block(7, 10)]
    second = summary_of(tmp_path, {"segments": [segment(blocks, 3 * ADDRESS)]})
    found = difference(first, second)
    assert [
        (one.frames[0], one.more, one.count_before, one.count_after) for one in found.changes
    ] == [
        ("/me/net.py:7 in forward", MIB, 1, 2),
        ("/me/net.py:8 in forward", -MIB, 1, 0),
        ("/me/net.py:10 in forward", 7, 0, 1),
    ]
    assert (found.before, found.after, found.complete) == (2 * MIB + 5, 2 * MIB + 12, True)
    assert difference(first, first).changes == ()
    assert not difference(first, replace(second, sites_left=3, size_left=9)).complete


def test_stacks_without_memory_are_not_kept(tmp_path: Path) -> None:
    trace = [action("alloc", 512, 10), action("free_requested", 512, 10)]
    trace += [action("alloc", 1024, 500, line=77)]
    found = summary_of(tmp_path, snapshot([live_block(8, line=5)], trace))
    assert {text.partition(" ")[0] for text in found.texts.values()} == {
        "/me/net.py:5",
        "/me/net.py:77",
    }
