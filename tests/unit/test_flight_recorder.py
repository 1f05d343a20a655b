"""NCCL's Flight Recorder by torch's debug pipe: never by a call that may wait for a driver."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.distributed import flight_recorder
from stepscope.distributed.flight_recorder import FILES, PIPE, NcclRecord, dump, open_pipe, parsed
from stepscope.distributed.hangs import record as hang_capture
from stepscope.distributed.hangs.record import HangRecord, capture


def entry(record: int, name: str = "gloo:all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": record,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": record + 1,
        "profiling_name": name,
        "time_created_ns": 1_795_350_317_825_382_756 + record * 1_000_000,
        "input_sizes": [[64]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
    } | fields


def content(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


RANK = 3


class Torch:
    """torch whose monitor thread answers when `answer` is called; `calls` are those of the dump."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enqueued = 5
        self.calls: list[tuple[bool, ...]] = []
        library = SimpleNamespace(_dump_nccl_trace=self._dump, _dump_fr_trace=self._dump)
        c = SimpleNamespace(_distributed_c10d=library)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=c))
        world = SimpleNamespace(pg_backend_config={"the default group": "cuda:nccl"})
        module = SimpleNamespace(_world=world)
        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
        monkeypatch.setenv(PIPE, str(folder / "pipe"))
        monkeypatch.setenv(FILES[0], str(folder / flight_recorder.OURS))
        self.file = folder / f"{flight_recorder.OURS}{RANK}"
        os.mkfifo(folder / f"pipe{RANK}.pipe")
        self._pipe = os.open(folder / f"pipe{RANK}.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def _dump(self, *asked: bool) -> bytes:
        self.calls.append(asked)
        status = {"last_enqueued_collective": self.enqueued}
        return pickle.dumps({"pg_status": {"0": status}, "pg_config": {}})

    def requests(self) -> int:
        """How many dumps were requested since the last call."""
        return len(os.read(self._pipe, 100))

    def answer(self) -> None:
        """Write the file as torch does, in place."""
        entry = {
            "record_id": self.enqueued,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": self.enqueued,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 10**18,
            "state": "scheduled",
        }
        self.file.write_bytes(pickle.dumps({"entries": [entry], "pg_config": {}}))

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    monkeypatch.setattr(flight_recorder, "WAIT_S", 0.0)
    monkeypatch.setattr(flight_recorder, "POLL_S", 0.0)
    monkeypatch.setattr(hang_capture, "_nccl", NcclRecord())
    made = Torch(tmp_path, monkeypatch)
    yield made
    made.close()


def captured() -> HangRecord:
    known = HangRecord(number=0, rank=RANK, step=9, since=0.0, seen=0.0)
    return capture(known, threading.get_ident())


def test_a_look_requests_a_dump_and_reads_it_when_it_is_there(torch: Torch) -> None:
    record = captured()
    assert (record.collectives, torch.requests()) == ((), 1)
    assert record.collectives_reason is not None
    torch.file.write_bytes(b"\x80")  # torch has begun to write it
    assert captured().collectives == ()
    torch.answer()
    record = captured()
    assert [one.sequence for one in record.collectives] == [5]
    assert record.collectives_reason is None
    assert not torch.file.exists()
    assert set(torch.calls) == {(False, False, False)}, "a dump of collectives asks CUDA"
    assert [one.sequence for one in captured().collectives] == [5]
    assert torch.requests() == 0, "collectives have not gone on"
    torch.enqueued = 6
    assert captured().collectives == (), "what was read before is not so any more"
    assert torch.requests() == 1


@pytest.mark.parametrize("missing", ["variable", "reader", "recorder"])
def test_what_cannot_be_read_says_why(
    torch: Torch, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if missing == "variable":
        monkeypatch.delenv(PIPE)
    elif missing == "reader":
        torch.close()
        torch._pipe = os.open(os.devnull, os.O_RDONLY)
    else:
        del sys.modules["torch"]._C._distributed_c10d._dump_nccl_trace
    record = captured()
    assert record.collectives == ()
    assert record.collectives_reason


def test_the_pipe_is_set_for_torch_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (PIPE, *FILES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    close = open_pipe(tmp_path / "run")
    assert close is not None
    stem = Path(os.environ[PIPE])
    assert Path(os.environ[FILES[0]]).parent == tmp_path / "run"
    assert open_pipe(tmp_path) is None, "what is set stays"
    os.mkfifo(f"{stem}0.pipe")
    close()
    assert not {PIPE, *FILES} & {*os.environ}
    assert list(tmp_path.iterdir()) == []


def test_an_entry_becomes_a_collective_or_point_to_point_operation() -> None:
    (one,) = parsed(content(entry(7, "nccl:all_reduce"))).collectives
    assert (one.sequence, one.group, one.operation, one.input_bytes) == (8, "0", "all_reduce", 256)
    assert one.done
    lists = entry(0, input_sizes=[[2, 3], [5]], input_dtypes=["BFloat16", "Long"])
    (one,) = parsed(content(lists)).collectives
    assert one.input_bytes == 2 * 6 + 8 * 5
    (one,) = parsed(content(entry(0, "nccl:send 0->1", is_p2p=True))).collectives
    assert (one.sequence, one.operation) == (None, "send 0->1")
    broken = {"record_id": 9, "profiling_name": "gloo:all_reduce"}
    assert [one.sequence for one in parsed(content(entry(3), broken)).collectives] == [4]


def test_the_recorder_is_read_without_stacks_and_runs_no_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[bool, ...]] = []
    data = [pickle.dumps(print), pickle.dumps(content(entry(0)), 2)]
    read = SimpleNamespace(_dump_fr_trace=lambda *flags: asked.append(flags) or data.pop())
    torch = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=read))
    monkeypatch.setitem(sys.modules, "torch", torch)
    record = dump()
    assert record is not None
    assert [one.sequence for one in record.collectives] == [1]
    assert (record.groups, asked) == ({"0": (0, 1)}, [(True, False, False)])
    with pytest.raises(pickle.UnpicklingError, match="builtins.print"):
        dump()
