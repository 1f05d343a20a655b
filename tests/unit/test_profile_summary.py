"""What is made of a trace: operators, phases, stacks, and a summary that is read with care."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stepscope.profiling import chrome_trace, summary_name, trace_name
from stepscope.profiling.chrome_trace import ChromeTrace
from stepscope.profiling.summary import (
    BYTES_LIMIT,
    OPERATORS_LIMIT,
    parse,
    summarize,
    to_text,
    write_profile,
)
from stepscope.profiling.trace_stats import fold, operators, phases
from tests.support.profiles import MAIN, STEP, event, frame, kernel, op, trace_of


def test_operators_have_their_own_time_memory_and_kernels() -> None:
    found = {operator.name: operator for operator in operators(trace_of(STEP))}
    linear, addmm, add = found["aten::linear"], found["aten::addmm"], found["aten::add_"]
    assert (linear.calls, linear.cpu_total_us, linear.cpu_self_us) == (1, 12, 4)
    assert (addmm.cpu_self_us, addmm.cuda_self_us, addmm.cuda_total_us) == (8, 300, 300)
    assert (linear.cuda_self_us, linear.cuda_total_us) == (0, 300)
    assert (addmm.cpu_memory, addmm.cuda_memory, linear.cpu_memory) == (64, 400, -24)
    # Called by itself: that is one call, and its time counts once.
    assert (add.calls, add.cpu_total_us, add.cpu_self_us, add.cuda_total_us) == (1, 10, 10, 50)
    assert next(iter(found)) == "aten::addmm"


def test_phases_come_from_ranges_and_from_what_torch_marks() -> None:
    found = phases(trace_of(STEP), MAIN)
    expected = {"data": 9, "forward": 20, "backward": 40, "optimizer": 20, "other": 11}
    assert found.cpu_us == expected
    # Backward's kernels were started in another thread, within the time of backward().
    expected = {"data": 0, "forward": 300, "backward": 200, "optimizer": 50, "other": 5}
    assert found.cuda_us == expected


def test_a_kernel_without_an_operator_belongs_to_the_part_that_launched_it() -> None:
    launch = event("cuda_runtime", "cudaGraphLaunch", 50, 2, correlation=123)
    late = event("kernel", "triton", 900, 30, 99, **{"External id": 0, "correlation": 123})
    found = phases(trace_of([*STEP, launch, late]), MAIN)
    assert found.cuda_us["backward"] == 200 + 30


def test_a_closure_of_the_optimizer_counts_as_what_it_is() -> None:
    closure = [
        event("user_annotation", "Optimizer.step#SGD.step", 0, 100),
        event("user_annotation", "forward", 10, 20),
        frame("nn.Module: Net_0", 12, 5),  # a phase within another one is part of that
        frame("torch/autograd/__init__.py(255): backward", 40, 30),
        frame("nn.Module: Net_0", 45, 5),  # checkpointing computes it again
        event("user_annotation", "Optimizer.step#SGD.step", 48, 1),
        op("aten::mul", 75, 10, 1),
        kernel(7.0, 1),
    ]
    found = phases(trace_of(closure), MAIN)
    assert found.cpu_us == {"data": 0, "forward": 20, "backward": 30, "optimizer": 50, "other": 0}
    assert found.cuda_us["optimizer"] == 7


def test_what_stepscope_does_between_two_steps_is_left_out() -> None:
    own = [
        *STEP,
        frame("stepscope/session/command_server.py(128): serve", 85, 15),
        frame("stepscope/profiling/torch_profiler.py(100): stop", 86, 10),
        op("aten::own", 87, 1, 9),
    ]
    summary = summarize(trace_of(own), first=1, last=1, cuda=True, thread=MAIN)
    assert "aten::own" not in {operator.name for operator in summary.operators}
    assert not any("stepscope/" in name for name in summary.flame.names)
    times = summary.phases.cpu_us
    assert (times["optimizer"], times["other"]) == (15, 1)


def test_a_trace_without_kernels_has_no_cuda_times() -> None:
    """The page showed 0.000 ms of GPU time for steps that launched no kernel."""
    on_cpu = [one for one in STEP if one.get("cat") != "kernel"]
    assert not summarize(trace_of(on_cpu), first=1, last=1, cuda=True, thread=MAIN).cuda


def test_stacks_are_folded() -> None:
    twice = [*STEP, *({**e, "ts": e["ts"] + 200} for e in STEP if e["tid"] == MAIN)]
    flame = fold(trace_of(twice), MAIN)
    paths = {}
    for node, parent in enumerate(flame.parent):
        name = flame.names[flame.name[node]]
        paths[node] = f"{paths[parent]};{name}" if parent >= 0 else name
    by_path = {paths[node]: (flame.total_us[node], flame.calls[node]) for node in paths}
    inner = "train.py(9): main;nn.Module: Net_0;nn.Module: Linear_0;aten::linear;aten::addmm"
    assert by_path[inner] == (16, 2)
    assert by_path["train.py(9): main"] == (200, 2)
    assert by_path["another thread of torch;autograd::engine;aten::mm"] == (10, 1)


def test_only_the_largest_nodes_are_kept_with_all_around_them() -> None:
    frames = [frame("main", 0, 1000)]
    frames += [frame(f"f{n}", 10 * n, 1 + n % 9) for n in range(90)]
    flame = fold(trace_of([*frames, op("aten::add", 1000, 1, 1)]), MAIN, limit=12)
    assert len(flame.parent) == 12
    assert flame.left_out == 92 - 12
    assert flame.names[flame.name[0]] == "main"
    assert all(parent < node for node, parent in enumerate(flame.parent))
    assert min(flame.total_us[1:]) == 8


def test_addresses_do_not_split_a_node() -> None:
    name = "<built-in method run_backward of torch._C._EngineBase object at 0x7f{}>"
    frames = [frame(name.format(n), 10 * n, 5) for n in range(3)]
    flame = fold(trace_of([*frames, op("aten::add", 1, 1, 1)]), MAIN)
    assert "<built-in method run_backward of torch._C._EngineBase object>" in flame.names
    assert flame.parent.count(-1) == 1


def test_torchs_own_sums_are_the_same(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as made:
        for _ in range(2):
            loss = model(torch.ones(8, 16)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    made.export_chrome_trace(str(tmp_path / "trace.json"))
    theirs = {row.key: row for row in made.key_averages()}
    with (tmp_path / "trace.json").open("rb") as file:
        summary = summarize(ChromeTrace(file), first=1, last=2, cuda=False, thread=None)
    assert summary.stacks
    ours = {operator.name: operator for operator in summary.operators}
    assert len(ours) > 20
    for name, operator in ours.items():
        assert operator.calls == theirs[name].count, name
        assert operator.cpu_memory == theirs[name].self_cpu_memory_usage, name
        # The trace has whole nanoseconds, and the annotations of torch in no operator's time.
        own_us = theirs[name].self_cpu_time_total
        assert operator.cpu_self_us == pytest.approx(own_us, abs=0.01 * operator.calls), name
    for phase in ("forward", "backward", "optimizer"):
        assert summary.phases.cpu_us[phase] > 0, phase


def test_many_operators_are_cut() -> None:
    many = [op(f"op{n}", 10 * n, 1 + n / 1000, n) for n in range(OPERATORS_LIMIT + 20)]
    summary = summarize(trace_of(many), first=1, last=1, cuda=False, thread=None)
    assert (len(summary.operators), summary.operators_left) == (OPERATORS_LIMIT, 20)
    assert summary.operators[0].name == f"op{OPERATORS_LIMIT + 19}"


def test_a_trace_without_operators_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no operators"):
        summarize(trace_of([]), first=1, last=1, cuda=False, thread=None)
    with pytest.raises(ValueError, match="traceEvents"):
        ChromeTrace(io.BytesIO(b"{}"))
    with pytest.raises(ValueError, match="truncated"):
        ChromeTrace(io.BytesIO(b'{"traceEvents": [{"ph": '))


def test_what_is_odd_in_a_trace_is_passed_over() -> None:
    odd = [
        7,
        {},
        {"ph": "X", "cat": "cpu_op", "ts": "now", "dur": 1, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1, "tid": "Spans"},
        {"ph": "i", "name": "[memory]", "ts": 1, "tid": 1, "args": {"Bytes": "many"}},
        {"ph": "X", "cat": "kernel", "ts": 1, "dur": None, "args": None},
    ]
    trace = trace_of([*odd, *STEP])
    assert len(operators(trace)) == len(operators(trace_of(STEP)))


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": "cpu_op", "name": "odd", "ts": 1, "dur": NaN, "tid": 1}',
        '{"ph": "X", "cat": "kernel", "name": "odd", "ts": -nan, "dur": 1, "tid": 1}',
        '{"ph": "X", "cat": "odd", "ts": 1, "dur": 1, "args": {"bandwidth": inf}}',
        r'{"ph": "X", "cat": "odd", "name": "\\\\\\ud83d", "ts": 1, "tid": 1}',
        r'{"ph": "i", "name": "\udc00\ud83d\ude00", "ts": 1, "tid": 1}',
        '{"ph": "X", "cat": "odd", "ts": 1, "dur":\nNaN\n, "tid": 1}',
    ],
)
def test_an_event_that_is_no_json_costs_no_other_event(
    monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    monkeypatch.setattr(chrome_trace, "_CHUNK_BYTES", 1)  # each line is a chunk
    rest = json.dumps([*STEP, op("a: NaN", 900, 1, 1), op("\\ud83d \U0001f600", 910, 1, 1)])
    trace = ChromeTrace(io.BytesIO(f'{{"traceEvents": [{event}, {rest[1:]}}}'.encode()))
    names = [operator.name for operator in operators(trace)]
    assert len(names) == len(operators(trace_of(STEP))) + 2
    assert "a: NaN" in names
    assert "\\ud83d \U0001f600" in names


HOSTILE: dict[str, Any] = {
    "schema": lambda c: c | {"schema": 2},
    "list": lambda c: [c],
    "first": lambda c: c | {"first": "1"},
    "infinite": lambda c: c | {"last": 1e300},
    "true": lambda c: c | {"operators_left": True},
    "operators": lambda c: c | {"operators": c["operators"] * 1000},
    "name": lambda c: c | {"operators": [c["operators"][0] | {"name": 5}]},
    "phases": lambda c: c | {"phases": {"cpu_us": {}}},
    "column": lambda c: c | {"flame": c["flame"] | {"calls": []}},
    "circle": lambda c: c | {"flame": c["flame"] | {"parent": [0] * len(c["flame"]["parent"])}},
    "index": lambda c: c | {"flame": c["flame"] | {"name": [99] * len(c["flame"]["name"])}},
    "nan": lambda c: c | {"flame": c["flame"] | {"total_us": [float("nan")] * 20}},
    "no flame": lambda c: c | {"flame": None},
}


def test_a_hostile_summary_is_refused(subtests: pytest.Subtests) -> None:
    good = json.loads(to_text(summarize(trace_of(STEP), first=3, last=4, cuda=True, thread=MAIN)))
    for kind, change in HOSTILE.items():
        with subtests.test(kind), pytest.raises(ValueError, match="must|is no JSON"):
            parse(json.dumps(change(good)))
    for text in ("[" * 100_000, "{", "x" * (BYTES_LIMIT + 1)):
        with pytest.raises(ValueError, match="is no JSON|must"):
            parse(text)


def test_a_written_summary_is_read_again_without_control_characters() -> None:
    summary = summarize(trace_of(STEP), first=3, last=4, cuda=True, thread=MAIN)
    assert parse(to_text(summary)) == summary
    assert (summary.first, summary.last, summary.cuda, summary.stacks) == (3, 4, True, True)
    summary.operators[0] = replace(summary.operators[0], name="a\x1b[31m\n" + "b" * 500)
    name = parse(to_text(summary)).operators[0].name
    assert name.startswith("a�[31m�b")
    assert len(name) == 200


def test_a_profile_is_packed_and_summarized(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_text(json.dumps({"traceEvents": STEP}))
    write_profile(tmp_path, raw, first=3, last=4, cuda=True, thread=MAIN)
    names = Counter(path.name for path in tmp_path.iterdir())
    assert names == Counter(["raw", trace_name(3, 4), summary_name(3, 4)])
    assert parse((tmp_path / summary_name(3, 4)).read_text()).last == 4


@pytest.mark.parametrize("odd", ["1", "NaN"])
def test_a_trace_is_in_memory_once(tmp_path: Path, odd: str) -> None:
    raw, size = tmp_path / "raw", 2**24
    padding = "".join('{"name": "%s"},\n' % ("\x01" + 1000 * "x") for _ in range(size // 1017))
    event = f'{{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": {odd}, "tid": 1}},'
    raw.write_text(f'{{"traceEvents": [{event}\n{padding}{json.dumps(STEP)[1:]}}}')
    tracemalloc.start()
    try:
        write_profile(tmp_path, raw, first=3, last=4, cuda=True, thread=MAIN)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * size


def test_a_trace_that_is_too_large_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.profiling.summary.RAW_LIMIT", 10)
    raw = tmp_path / "raw"
    raw.write_text(json.dumps({"traceEvents": STEP}))
    with pytest.raises(ValueError, match="profile fewer steps"):
        write_profile(tmp_path, raw, first=3, last=4, cuda=True, thread=MAIN)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
