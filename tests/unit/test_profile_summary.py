"""The summary of torch's key_averages(), and its file, which is read with care."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from stepscope.profiling.summary import (
    MAX_BYTES,
    MAX_OPERATORS,
    OperatorKind,
    parse,
    summarize,
    to_json,
)
from tests.support.profiles import average, summary


def test_a_row_has_its_kind_times_and_memory() -> None:
    found = summary()
    assert (found.first, found.last, found.cuda, found.operators_left) == (5, 6, True, 0)
    assert [(operator.name, operator.kind) for operator in found.operators] == [
        ("aten::addmm", OperatorKind.OPERATOR),
        ("sgemm", OperatorKind.KERNEL),
        ("forward", OperatorKind.RANGE),  # without its copy on the device's timeline
    ]
    row = found.operators[0]
    assert (row.calls, row.cpu_self_us, row.cuda_self_us, row.cuda_total_us) == (2, 8, 300, 300)
    assert (row.cpu_memory, row.cuda_memory) == (64, -400)
    assert not summary(cuda=False).cuda
    older = average("forward")
    del older.is_user_annotation
    assert summarize([older], first=1, last=1).operators[0].kind is OperatorKind.OPERATOR


def test_torchs_own_sums_are_kept() -> None:
    model = nn.Linear(16, 32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        for _ in range(2):
            with record_function("forward"):
                loss = model(torch.ones(8, 16)).sum()
            loss.backward()
    averages = made.key_averages()
    by_name = {one.name: one for one in summarize(averages, first=1, last=2).operators}
    for row in averages:
        operator = by_name[row.key]
        assert operator.calls == row.count
        assert operator.cpu_total_us == pytest.approx(row.cpu_time_total, abs=0.06)
        assert operator.cpu_memory == row.self_cpu_memory_usage
    assert by_name["forward"].kind is OperatorKind.RANGE
    assert by_name["forward"].cpu_total_us > by_name["forward"].cpu_self_us > 0


def test_the_operators_with_the_most_time_are_kept() -> None:
    rows = [average(f"op{number}", number) for number in range(MAX_OPERATORS + 2)]
    many = summarize(rows, first=1, last=1)
    assert (many.operators[0].name, many.operators_left) == (rows[-1].key, 2)


def test_a_written_summary_is_read_again_without_control_characters() -> None:
    assert parse(to_json(summary())) == summary()
    found = summarize([average("a\x1b[31m\n" + "b" * 5000)], first=1, last=1)
    name = parse(to_json(found)).operators[0].name
    assert name.startswith("a�[31m�b")
    assert len(name) == 200


HOSTILE: dict[str, Any] = {
    "schema": lambda c: c | {"schema": 1},
    "infinite": lambda c: c | {"last": 1e300},
    "operators": lambda c: c | {"operators": c["operators"] * 1000},
    "kind": lambda c: c | {"operators": [c["operators"][0] | {"kind": "x"}]},
    "negative": lambda c: c | {"operators": [c["operators"][0] | {"calls": -1}]},
    "nan": lambda c: c | {"operators": [c["operators"][0] | {"cpu_self_us": float("nan")}]},
}


def test_a_hostile_summary_is_refused(subtests: pytest.Subtests) -> None:
    good = json.loads(to_json(summary()))
    for kind, change in HOSTILE.items():
        with subtests.test(kind), pytest.raises(ValueError, match="must|is no JSON"):
            parse(json.dumps(change(good)).encode())
    for content in (b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError, match="is no JSON|must be"):
            parse(content)
    with pytest.raises(ValueError, match=f"at most {MAX_BYTES} bytes"):
        parse(to_json(summary()).ljust(MAX_BYTES + 1))
