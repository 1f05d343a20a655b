"""The ring: order, capacity, holes, layouts, and the rows of a dead process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.store import ring as ring_module
from stepscope.store.ring import (
    FILE_BYTES,
    HEADER_BYTES,
    MAGIC,
    MARGIN,
    SLOT_BYTES,
    SLOTS,
    RingBuffer,
    RingError,
    RingRows,
    RowLayout,
    read_ring,
    rows_after,
)
from stepscope.store.schema import MAX_SERIES


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingBuffer]:
    ring = RingBuffer(tmp_path / "rank0.ring")
    yield ring
    ring.delete()


def layout(ring: RingBuffer, *keys: str) -> RowLayout:
    found = ring.layout(("steps", "", *keys))
    assert found is not None
    return found


def fill(ring: RingBuffer, start: int, stop: int) -> None:
    loss = layout(ring, "train/loss")
    for step in range(start, stop):
        ring.put(loss, 100.0 + step, step, step / 2)


def steps(ring: RingBuffer) -> list[int]:
    found: list[int] = ring.pending().slots["step"].tolist()
    return found


def left_by(path: Path, stored: int = 0) -> RingRows:
    return rows_after(read_ring(path), stored)


def test_rows_come_out_in_order_and_only_once(ring: RingBuffer) -> None:
    fill(ring, 1, 4)
    rows = ring.pending()
    assert rows.slots["step"].tolist() == [1, 2, 3]
    assert rows.slots["ts"].tolist() == [101.0, 102.0, 103.0]
    assert rows.slots["values"][:, 0].tolist() == [0.5, 1.0, 1.5]
    assert steps(ring) == [1, 2, 3], "until they are released they stay"
    ring.release(rows)
    assert steps(ring) == []


def test_it_wraps_around_and_a_full_ring_drops_new_rows(ring: RingBuffer) -> None:
    for lap in range(3):
        fill(ring, lap * 60_000, (lap + 1) * 60_000)
        assert steps(ring) == list(range(lap * 60_000, (lap + 1) * 60_000))
        ring.release(ring.pending())
    assert ring.dropped == 0
    fill(ring, 0, SLOTS + 5)
    capacity = SLOTS - MARGIN + 1
    assert steps(ring) == list(range(capacity))
    assert ring.dropped == SLOTS + 5 - capacity


def test_a_slot_that_is_never_written_blocks_few_rows(ring: RingBuffer) -> None:
    fill(ring, 1, 2)
    ring.claim()  # a thread that is ended before it writes
    fill(ring, 3, 5)
    assert steps(ring) == [1]
    ring.release(ring.pending())
    fill(ring, 5, 3 + MARGIN)
    rows = ring.pending()
    assert rows.slots["step"].tolist() == list(range(3, 3 + MARGIN))
    assert (rows.end, ring.dropped) == (2 + MARGIN, 0)
    ring.release(rows)
    assert ring.dropped == 1


def test_stop_finds_every_claimed_row_and_accepts_no_more(ring: RingBuffer) -> None:
    fill(ring, 1, 3)
    ring.claim()
    fill(ring, 4, 5)
    ring.claim()
    ring.last = 0  # as after a race of two threads
    ring.stop()
    ring.last = 0
    fill(ring, 6, 7)
    rows = ring.pending()
    ring.release(rows)
    assert rows.slots["step"].tolist() == [1, 2, 4]
    assert (ring.waiting(), ring.dropped) == (0, 3), "two slots and a late row"
    fill(ring, 8, 9)
    assert ring.waiting() == 0, "a stopped ring stays stopped"


def test_layouts_are_distinct_and_limited(ring: RingBuffer) -> None:
    assert layout(ring, "a") is layout(ring, "a")
    assert layout(ring, "b").number != layout(ring, "a").number
    names = 0
    while ring.layout(("steps", "", f"{'metric' * 100}/{names}")):
        names += 1
    assert 1000 < names < HEADER_BYTES
    assert layout(ring, "a") is not None, "known ones remain"


def test_the_rows_of_a_dead_process_are_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    ring = RingBuffer(path)
    fill(ring, 0, 10)
    ring.claim()
    fill(ring, 11, 13)
    left = left_by(path, 4)
    assert left.slots["step"].tolist() == [4, 5, 6, 7, 8, 9, 11, 12]
    assert (left.end, left.layouts) == (13, [("steps", "", "train/loss")])
    data = bytearray(path.read_bytes())
    last = HEADER_BYTES + 13 * SLOT_BYTES
    data[last - 8 : last] = bytes(8)  # torn by the kill
    header_end = data.index(b"\0")
    data[header_end : header_end + 13] = b'["a long name'  # and a layout written in part
    path.write_bytes(data)
    left = left_by(path, 11)
    assert (left.slots["step"].tolist(), len(left.layouts)) == ([11], 1)


@pytest.mark.parametrize("kind", ["empty", "cut", "zeros"])
def test_a_file_that_is_no_ring_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rank0.ring"
    path.write_bytes({"cut": MAGIC, "zeros": bytes(100)}.get(kind, b""))
    with pytest.raises(RingError):
        left_by(path)


SERIES = b"".join(b'["steps", "%d", "a"]\n' % number for number in range(30_000))


@pytest.mark.parametrize(("header", "layouts"), [(b"[" * 60_000, 0), (SERIES, MAX_SERIES)])
def test_a_planted_ring_has_no_more_series_than_a_reader_reads(
    tmp_path: Path, header: bytes, layouts: int
) -> None:
    """Each series takes a pass over all slots."""
    path = tmp_path / "rank0.ring"
    path.write_bytes((MAGIC + header).ljust(FILE_BYTES, b"\0"))
    assert len(left_by(path).layouts) == layouts


def test_without_a_file_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file" in str(RingBuffer(tmp_path / "missing" / "rank0.ring").reason)
    monkeypatch.setattr(ring_module, "is_network_filesystem", lambda _path: True)
    ring = RingBuffer(tmp_path / "rank0.ring")
    assert "network" in str(ring.reason)
    fill(ring, 1, 3)
    assert steps(ring) == [1, 2]
    assert list(tmp_path.iterdir()) == []
