"""What the Flight Recorder's dumps say: of gloo and NCCL, in the forms of several torches.

The entries are those that torch 2.13 wrote for these calls, on a CPU and on the CUDA simulator.
"""

from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.distributed import flight_recorder
from stepscope.distributed.flight_recorder import dump, parsed
from tests.support.flight_recorder import content, entry


def torch_with(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    library = SimpleNamespace(**calls)
    torch = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=library))
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_an_entry_becomes_a_collective() -> None:
    (one,) = parsed(content(entry(7, "nccl:all_reduce", duration_ms=0.5))).collectives
    assert (one.record, one.sequence, one.group, one.backend) == (7, 8, "0", "nccl")
    assert (one.operation, one.sizes, one.input_bytes) == ("all_reduce", ((64,),), 256)
    assert (one.duration_s, one.done) == (0.0005, True)


def test_bytes_are_of_all_tensors_by_their_types() -> None:
    lists = entry(0, input_sizes=[[2, 3], [5]], input_dtypes=["BFloat16", "Long"], output_sizes=[])
    (one,) = parsed(content(lists)).collectives
    assert (one.input_bytes, one.output_bytes) == (2 * 6 + 8 * 5, 0)


def test_a_message_has_no_number_that_all_ranks_know() -> None:
    (one,) = parsed(content(entry(0, "nccl:send 0->1", is_p2p=True))).collectives
    assert (one.sequence, one.operation) == (None, "send 0->1")


def test_only_newer_records_and_none_of_another_form() -> None:
    broken = {"record_id": 9, "profiling_name": "gloo:all_reduce"}
    found = parsed(content(*(entry(record) for record in range(5)), broken), after=2)
    assert [one.record for one in found.collectives] == [3, 4]


def test_both_recorders_are_read_without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []

    def answer(*entries: dict[str, Any]) -> Any:
        return lambda *flags: asked.append(flags) or pickle.dumps(content(*entries), 2)

    torch_with(
        monkeypatch,
        _dump_fr_trace=answer(entry(0), entry(2)),
        _dump_nccl_trace=answer(entry(1, "nccl:all_reduce")),
    )
    record = dump()
    assert record is not None
    assert [(one.backend, one.record) for one in record.collectives] == [
        ("gloo", 0),
        ("nccl", 1),
        ("gloo", 2),
    ]
    assert record.groups == {"0": (0, 1)}
    assert asked == [(True, False, False)] * 2


def test_a_torch_that_writes_json_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(content(entry(4))).encode()
    torch_with(monkeypatch, _dump_fr_trace_json=lambda *flags: text)
    record = dump()
    assert record is not None
    assert [one.record for one in record.collectives] == [4]


def test_without_a_recorder_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert dump() is None
    torch_with(monkeypatch)
    assert dump() is None


def test_a_dump_that_would_run_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, _dump_fr_trace=lambda *flags: pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="in a Flight Recorder dump"):
        flight_recorder.dumps()
