"""The ring: rows in order, room counted, holes passed, layouts kept, remains of a dead process."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.recorder import ring as ring_module
from stepscope.recorder.ring import (
    CROWDED,
    HEADER_BYTES,
    MAGIC,
    MARGIN,
    SLOT_BYTES,
    SLOTS,
    WIDTH,
    RingBuffer,
    RingError,
    RowLayout,
    abandoned,
)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingBuffer]:
    ring = RingBuffer(tmp_path / "rank0.ring")
    yield ring
    ring.close()


def layout(ring: RingBuffer, *keys: str, timed: bool = False) -> RowLayout:
    found = ring.layout(keys, timed)
    assert found is not None
    return found


def fill(ring: RingBuffer, start: int, stop: int) -> None:
    loss = layout(ring, "train/loss")
    for step in range(start, stop):
        ring.put(loss, 100.0 + step, step, [step / 2])


def steps(ring: RingBuffer) -> list[int]:
    found: list[int] = ring.pending().slots["step"].tolist()
    return found


def test_rows_come_out_in_order_and_only_once(ring: RingBuffer) -> None:
    fill(ring, 1, 4)
    rows = ring.pending()
    assert rows.slots["step"].tolist() == [1, 2, 3]
    assert rows.slots["ts"].tolist() == [101.0, 102.0, 103.0]
    assert rows.slots["values"][:, 0].tolist() == [0.5, 1.0, 1.5]
    assert ring.pending().upto == rows.upto == 3, "until they are released they stay"
    ring.release(rows)
    fill(ring, 4, 5)
    assert steps(ring) == [4]


def test_it_goes_round(ring: RingBuffer) -> None:
    for lap in range(3):
        fill(ring, lap * 60_000, (lap + 1) * 60_000)
        assert steps(ring) == list(range(lap * 60_000, (lap + 1) * 60_000))
        ring.release(ring.pending())
    assert ring.dropped == 0


def test_a_full_ring_keeps_the_old_rows_and_counts_the_new(ring: RingBuffer) -> None:
    fill(ring, 0, SLOTS + 5)
    room = SLOTS - MARGIN + 1
    assert steps(ring) == list(range(room))
    assert ring.dropped == SLOTS + 5 - room
    ring.release(ring.pending())
    fill(ring, 7, 8)
    assert steps(ring) == [7]


def test_a_claimed_slot_holds_the_rows_behind_it_for_a_second(
    ring: RingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 50.0
    monkeypatch.setattr(ring_module.time, "monotonic", lambda: now)
    fill(ring, 1, 2)
    ring.claim()  # a thread that is ended before it writes
    fill(ring, 3, 5)
    assert steps(ring) == [1]
    ring.release(ring.pending())
    assert steps(ring) == []
    now += 1.0
    rows = ring.pending()
    assert (len(rows.slots), rows.upto, ring.lost) == (0, 2, 0)
    ring.release(rows)
    assert ring.lost == 1
    assert steps(ring) == [3, 4]


def test_the_end_goes_behind_every_hole_at_once(ring: RingBuffer) -> None:
    fill(ring, 1, 2)
    ring.claim()
    fill(ring, 3, 4)
    ring.claim()
    fill(ring, 5, 6)
    ring.stop()
    rows = ring.pending(everything=True)
    ring.release(rows)
    assert rows.slots["step"].tolist() == [1, 3, 5]
    assert (ring.waiting(), ring.lost) == (0, 2)


def test_stop_finds_every_claimed_row_and_takes_no_more(ring: RingBuffer) -> None:
    fill(ring, 1, 3)
    ring.last = 0  # as after a race of two threads
    ring.stop()
    ring.last = 0  # and again after it
    assert steps(ring) == [1, 2]
    fill(ring, 3, 4)
    assert steps(ring) == [1, 2]
    ring.release(ring.pending())
    fill(ring, 3, 4)
    assert ring.waiting() == 0, "a stopped ring stays stopped"


def test_layouts_are_told_apart_and_limited(ring: RingBuffer) -> None:
    assert layout(ring, "a") is layout(ring, "a")
    assert layout(ring, "a", timed=True) is not layout(ring, "a")
    assert ring.layout(tuple(map(str, range(WIDTH + 1))), False) is None
    names = 0
    while ring.layout((f"metric/{names}", f"other/{names}"), False):
        names += 1
    assert 500 < names < HEADER_BYTES
    assert ring.layout(("single",), False) is not None, "room is kept for metrics by themselves"


def test_what_a_dead_process_left_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    ring = RingBuffer(path)
    fill(ring, 0, 10)
    ring.claim()
    fill(ring, 11, 13)
    with pytest.raises(RingError, match="in use"), abandoned(path):
        pytest.fail("a live ring was opened")
    ring.leave()  # gives up the lock as a killed process does
    with abandoned(path) as remains:
        left = remains(4)
    assert left.slots["step"].tolist() == [4, 5, 6, 7, 8, 9, 11, 12]
    assert left.end == 13
    assert left.layouts == [(("train/loss",), False)]


def test_a_slot_torn_by_the_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    ring = RingBuffer(path)
    fill(ring, 0, 3)
    ring.leave()
    data = bytearray(path.read_bytes())
    number_of_last = HEADER_BYTES + 3 * ring_module.SLOT_BYTES - 8
    data[number_of_last : number_of_last + 8] = bytes(8)
    header_end = data.index(b"\0")
    data[header_end : header_end + 12] = b'{"keys": ["x'  # and a layout half written
    path.write_bytes(data)
    with abandoned(path) as remains:
        left = remains(0)
    assert left.slots["step"].tolist() == [0, 1]
    assert len(left.layouts) == 1


@pytest.mark.parametrize("content", [b"", b"stepscope ring 1\n", b"\0" * 100])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.ring"
    path.write_bytes(content)
    with pytest.raises(RingError, match="not a ring"), abandoned(path):
        pytest.fail("a foreign file was opened")


@pytest.mark.parametrize("kind", ["fifo", "link", "sparse"])
def test_a_special_file_is_refused_without_waiting_or_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rank0.ring"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.write(MAGIC)
            file.truncate(30 * 2**30)
    with pytest.raises((RingError, OSError)), abandoned(path):
        pytest.fail("a special file was opened")


def test_nested_brackets_in_the_header_are_no_layout(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    path.write_bytes((MAGIC + b"[" * 60_000).ljust(HEADER_BYTES + SLOTS * SLOT_BYTES, b"\0"))
    with abandoned(path) as remains:
        assert remains(0).layouts == []


def test_without_a_file_it_works_in_memory_and_says_why(tmp_path: Path) -> None:
    ring = RingBuffer(tmp_path / "missing" / "rank0.ring")
    assert ring.reason is not None
    assert "no file for the ring" in ring.reason
    fill(ring, 1, 3)
    assert steps(ring) == [1, 2]


def test_it_tells_the_writer_once_that_many_rows_wait(tmp_path: Path) -> None:
    told: list[int] = []
    ring = RingBuffer(tmp_path / "rank0.ring", crowded=lambda: told.append(ring.waiting()))
    fill(ring, 0, CROWDED + 1)
    assert told == []
    assert ring.last >= ring.gate, "a writer without a check of its own goes the long way now"
    fill(ring, CROWDED + 1, CROWDED + 50)
    assert told == [CROWDED + 1]
    assert ring.gate == ring.end
    ring.release(ring.pending())
    fill(ring, 0, CROWDED + 10)
    assert len(told) == 2
    assert ring.dropped == 0
    ring.close()


def test_a_forked_child_writes_no_layout_over_the_parents(ring: RingBuffer, tmp_path: Path) -> None:
    layout(ring, "train/loss")
    before = (tmp_path / "rank0.ring").read_bytes()[:HEADER_BYTES]
    child = copy.copy(ring)  # it shares the map, as after a fork
    child._lock = None
    child.leave()
    assert child.layout(("train/accuracy",), True) is None
    assert (tmp_path / "rank0.ring").read_bytes()[:HEADER_BYTES] == before


@pytest.fixture
def locks_of_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes of flock a lock of a range, which a file open for reading cannot hold."""
    flock = fcntl.flock

    def of_nfs(file: int, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)


@pytest.mark.usefixtures("locks_of_nfs")
def test_writer_and_recovery_hold_the_lock_on_nfs(tmp_path: Path) -> None:
    ring = RingBuffer(tmp_path / "rank0.ring")
    fill(ring, 1, 3)
    with pytest.raises(RingError, match="in use"), abandoned(ring.path):
        pass
    ring.leave()  # the lock is gone, as with its process
    with abandoned(ring.path) as remains:
        assert remains(0).slots["step"].tolist() == [1, 2]
        with pytest.raises(RingError, match="in use"), abandoned(ring.path, look_only=True):
            pass


def test_without_locks_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ring = RingBuffer(tmp_path / "rank0.ring")
    assert ring.reason is None
    fill(ring, 1, 3)
    with pytest.raises(RingError, match="in use"), abandoned(ring.path, alive=lambda: True):
        pass
    with abandoned(ring.path, alive=lambda: False) as remains:
        assert remains(0).slots["step"].tolist() == [1, 2]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_ring_that_may_not_be_written_can_be_looked_at(
    ring: RingBuffer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fill(ring, 1, 3)
    os_open = os.open

    def read_only(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(code, os.strerror(code))
        return os_open(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match=os.strerror(code)), abandoned(ring.path):
        pass
    with abandoned(ring.path, look_only=True) as remains:
        assert remains(0).slots["step"].tolist() == [1, 2]


def test_on_a_network_file_system_the_ring_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "is_network_filesystem", lambda _path: True)
    ring = RingBuffer(tmp_path / "rank0.ring")
    fill(ring, 1, 4)
    assert steps(ring) == [1, 2, 3]
    assert "network" in str(ring.reason)
    ring.close()
    assert list(tmp_path.iterdir()) == []
