"""Snapshot files: what is read of a real one, and that a hostile one ends in one kind of error."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.memory.snapshots import open_snapshot as loading
from stepscope.memory.snapshots.open_snapshot import SnapshotError, load
from stepscope.memory.snapshots.summary import SnapshotSummary
from tests.support.snapshots import REAL, live_block, segment, snapshot

MEMORY = 2**31
"""Of address space, for the tests that ask for more."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit this process as the one that opens foreign files is."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read(path: Path, content: object) -> SnapshotSummary:
    """Load what Python's pickler makes of this."""
    path.write_bytes(pickle.dumps(content))
    return load(path)


def refused(path: Path, data: bytes) -> str:
    """Return the sentence with which these bytes are refused."""
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    return str(caught.value)


class Calls:
    """Pickles as a call of `os.mkdir`."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (self._target,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(path: Path, tmp_path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps(snapshot([live_block(8)]), protocol))
    assert load(path).stacks[0].size == 8
    target = tmp_path / "made"
    content = snapshot([live_block(8)]) | {"extra": Calls(str(target))}
    said = refused(path, pickle.dumps(content, protocol))
    assert "snapshot.pickle: must be a pickle of plain containers" in said
    assert "mkdir" in said
    assert "_dump_snapshot" in said
    assert not target.exists()


HOSTILE = {
    "global": b"cos\nsystem\n(S'true'\ntR.",
    "inst": b"(S'true'\nios\nsystem\n.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "persistent": b"Pabc\n.",
    "extension": b"\x80\x02\x82\x01.",
    "empty": b"",
    "no stop": b"\x80\x04}",
    "a number": b"\x80\x04K\x01.",
    "other keys": pickle.dumps({"model": 1, (): 2}),
    "segments are no list": pickle.dumps({"segments": {}, "device_traces": []}),
}


def test_a_file_that_is_no_snapshot_is_refused_with_its_name_and_a_remedy(
    path: Path,
) -> None:
    for name, content in HOSTILE.items():
        said = refused(path, content)
        assert said.startswith("snapshot.pickle: must "), name
        assert "torch.cuda.memory._dump_snapshot" in said, name


def test_a_laugh_a_billion_times_over_is_read_once(path: Path) -> None:
    """Lists of lists of the same list: 10^12 blocks in a kilobyte."""
    blocks = [live_block(8)] * 10_000
    shared = segment(blocks)
    again = {**shared, "blocks": shared["blocks"]}
    summary = read(path, {"segments": [shared] * 5_000 + [again] * 5_000})
    assert (summary.allocated, summary.blocks) == (80_000, 10_000)


def test_limits_of_size_and_kind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(pickle.dumps(snapshot([])))
    monkeypatch.setattr(loading, "MAX_FILE_BYTES", 10)
    with pytest.raises(SnapshotError, match="must have at most 10"):
        load(path)
    os.mkfifo(path.with_name("pipe"))
    for other in (path.with_name("absent"), path.with_name("pipe"), path.parent):
        with pytest.raises(SnapshotError, match="must be a file"):
            load(other)


# --- anything at all ------------------------------------------------------------------------------

REAL_BYTES = REAL.read_bytes()
RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150
)


@pytest.mark.usefixtures("little_memory")
@RELAXED
@given(data=st.data())
def test_a_broken_file_is_summarized_or_refused(path: Path, data: st.DataObject) -> None:
    """Bytes of a real snapshot are replaced, cut out or doubled."""
    broken = bytearray(REAL_BYTES)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(0, len(broken) - 1)))
        kind = data.draw(st.sampled_from(["replace", "cut", "double", "end"]))
        length = data.draw(st.integers(1, 40))
        if kind == "replace":
            broken[at : at + 1] = data.draw(st.binary(min_size=1, max_size=3))
        elif kind == "cut":
            del broken[at : at + length]
        elif kind == "double":
            broken[at:at] = broken[at : at + length]
        else:
            del broken[at:]
    path.write_bytes(bytes(broken))
    try:
        found = load(path)
    except SnapshotError:
        return
    assert 0 <= found.allocated <= found.reserved
    assert sum(stack.size for stack in found.stacks) == found.allocated
