"""Who is slow by who entered the collectives last, where no DDP tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.diagnosis.straggler_arrivals import times_by_arrival
from stepscope.diagnosis.straggler_times import OWN, Phase, RankRows, RankTimes
from stepscope.diagnosis.straggler_window import ARRIVALS_BYTES, judged_ranks, recent_times
from stepscope.diagnosis.stragglers import Kind, judge
from stepscope.sampling.arrivals import KEPT, Arrivals
from stepscope.sampling.flight_recorder import Collective, FlightRecord
from stepscope.store import RunReader
from stepscope.store.frames import Floats
from tests.support.recorded_runs import Row, write_run
from tests.support.straggler_cases import noise

PHASES = ("perf/data_wait", "perf/forward", "perf/backward", "perf/optimizer")


def sharded(own: Floats, host: str = "here", *, has_loader: bool = True) -> list[RankRows]:
    """Ranks with the phases `own` (ranks, 5, steps) that meet at forward's and backward's end.

    What a rank waits counts for the phase in which it waits, as the host's clock has it. Without a
    loader they meet before forward, and all since the last step counts for forward.
    """
    meets = (Phase.FORWARD if has_loader else Phase.INPUT, Phase.BACKWARD)
    ranks, _, count = own.shape
    now = np.zeros(ranks)
    created: list[list[float]] = [[] for _ in range(ranks)]
    columns = {key: np.zeros((ranks, count)) for key in ("perf/step_time", *PHASES)}
    ends = np.zeros((ranks, count))
    order = [OWN.index(phase) for phase in (Phase.OTHER, Phase.INPUT, Phase.FORWARD)]
    for step in range(count):
        began = now.copy()
        for place in (*order, OWN.index(Phase.BACKWARD), OWN.index(Phase.OPTIMIZER)):
            start = now.copy()
            now = now + own[:, place, step]
            if OWN[place] in meets:
                for rank in range(ranks):
                    created[rank].append(now[rank])
                now = np.full(ranks, now.max())
            if OWN[place] is not Phase.OTHER:
                key = "perf/data_wait" if OWN[place] is Phase.INPUT else f"perf/{OWN[place]}"
                columns[key][:, step] = now - start
        if not has_loader:
            input_s = columns["perf/data_wait"][:, step].copy()
            columns["perf/data_wait"][:, step] = np.nan
            columns["perf/forward"][:, step] += input_s + own[:, order[0], step]
        columns["perf/step_time"][:, step] = now - began
        ends[:, step] = now
    return [
        RankRows(
            rank=rank,
            steps=np.arange(count, dtype=float),
            ts=ends[rank],
            columns={key: values[rank] for key, values in columns.items()},
            sequence=np.arange(2 * count, dtype=float),
            created=np.array(created[rank]),
            host=host,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("phase", [phase for phase in OWN if phase is not Phase.COMMUNICATION])
def test_the_slow_rank_is_named_with_its_phase(phase: Phase) -> None:
    own = noise(4, 100, seed=1, size=0.05)
    own[2, OWN.index(phase)] += 0.006
    found = judge(times_by_arrival(sharded(own)))
    assert (found.kind, found.ranks, found.phase) == (Kind.STRAGGLER, (2,), phase)


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (Phase.OTHER, Phase.INPUT),
        (Phase.INPUT, Phase.INPUT),
        (Phase.FORWARD, Phase.FORWARD),
        (Phase.BACKWARD, Phase.BACKWARD),
    ],
)
def test_without_a_loader_a_delay_before_the_first_gathering_is_not_one_of_forward(
    planted: Phase, named: Phase
) -> None:
    own = noise(4, 100, seed=6, size=0.05)
    own[2, OWN.index(planted)] += 0.006
    found = judge(times_by_arrival(sharded(own, has_loader=False)))
    assert (found.kind, found.ranks, found.phase) == (Kind.STRAGGLER, (2,), named)
    assert ("before it calls its model" in found.text) is (named is Phase.INPUT)


def test_what_a_rank_does_by_itself_comes_out_without_its_waiting() -> None:
    own = noise(3, 50, seed=2, size=0.05)
    own[1, OWN.index(Phase.BACKWARD)] += 0.01
    rows = sharded(own)
    for rank, times in enumerate(times_by_arrival(rows)):
        chosen = times.steps.astype(int)
        for place, phase in enumerate(OWN):
            true = own[rank, place, chosen - (phase is Phase.OPTIMIZER)]
            known = np.isfinite(times.own[place])
            np.testing.assert_allclose(times.own[place][known], true[known], atol=1e-9)
            # Of 50 steps: where the first begins and the last ends, no collective tells.
            assert known.sum() == len(known) == 48


def test_equal_ranks_are_not_named() -> None:
    assert judge(times_by_arrival(sharded(noise(4, 100, seed=3)))).kind is Kind.NONE


def test_without_common_collectives_nothing_is_known() -> None:
    one, other = sharded(noise(2, 50, seed=4))
    apart = replace(other, sequence=other.sequence + 1000)
    found = judge(times_by_arrival([one, apart]))
    assert (found.kind, found.steps) == (Kind.NONE, 0)


def test_clocks_of_several_hosts_are_not_compared() -> None:
    own = noise(2, 100, seed=5, size=0.05)
    own[1, 1] += 0.01
    rows = sharded(own)
    silent = [
        replace(one, wait=one.wait[:0], steps=one.steps[:0]) for one in times_by_arrival(rows)
    ]
    job = {"world_size": 2}
    here = [replace(one, arrived=row) for one, row in zip(silent, rows, strict=True)]
    found = judged_ranks(here, job, 0.5)
    assert found is not None
    assert found.ranks == (1,)
    there = [here[0], replace(here[1], arrived=replace(rows[1], host="there"))]
    found = judged_ranks(there, job, 0.5)
    assert found is not None
    assert found.kind is Kind.NONE
    assert judged_ranks(here, {}, 0.5) is None


def entered(sequence: int | None, *, group: str = "0", backend: str = "gloo") -> Collective:
    return Collective(
        record=0,
        sequence=sequence,
        group=group,
        operation="all_reduce",
        sizes=(),
        input_bytes=0,
        output_bytes=0,
        created_s=1000.0 + (sequence or 0),
        state="scheduled",
        done=False,
        duration_s=None,
        backend=backend,
    )


def test_only_blocking_collectives_of_all_ranks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    arrivals = Arrivals(path)
    arrivals.write()
    assert not path.exists()
    groups = {"0": (0, 1, 2, 3), "1": (0, 1)}
    seen = [
        entered(1),
        entered(2, group="1"),
        entered(3, backend="nccl"),
        entered(None),
        entered(4),
    ]
    arrivals.note(FlightRecord(collectives=tuple(seen), groups=groups))
    arrivals.note(FlightRecord(collectives=(entered(4), entered(5)), groups=groups))
    arrivals.write()
    assert json.loads(path.read_text()) == {"sequence": [1, 4, 5], "s": [1001.0, 1004.0, 1005.0]}
    many = tuple(entered(number) for number in range(6, 2 * KEPT))
    arrivals.note(FlightRecord(collectives=many, groups=groups))
    arrivals.write()
    assert len(json.loads(path.read_text())["sequence"]) == KEPT
    assert sorted(tmp_path.iterdir()) == [path]


def arrived(folder: Path, told: object, host: Any = "here") -> RankTimes:
    """Read a rank without DDP's log whose file of arrivals has this content."""
    values = {"perf/step_time": 0.01}
    rows: list[Row] = [(0.01 * step, step, values) for step in range(100)]
    write_run(folder, {"world_size": 2}, steps=rows)
    (folder / "arrivals.json").write_text(told if isinstance(told, str) else json.dumps(told))
    with RunReader(folder) as reader:
        return recent_times(reader, folder, 0, {"device": "cpu", "host": host})


RISING = {"sequence": [1, 2, 3], "s": [0.1, 0.5, 0.9]}


def test_a_file_of_arrivals_is_read(tmp_path: Path) -> None:
    found = arrived(tmp_path, RISING).arrived
    assert found is not None
    assert (found.host, found.sequence.tolist()) == ("here", [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "told",
    [
        "[" * 100_000,
        json.dumps(RISING) + " " * ARRIVALS_BYTES,
        RISING | {"sequence": [1, 3, 2]},
        RISING | {"sequence": [1, 2, 2]},
        RISING | {"s": [0.1, 0.9, 0.5]},
        RISING | {"s": [0.1, 0.5, 1e999]},
        RISING | {"s": [0.1, 0.5, 10**400]},
        {"sequence": [[1], [2], [3]], "s": [[0.1], [0.5], [0.9]]},
        {"sequence": 1, "s": 2},
        [],
    ],
)
def test_arrivals_that_nobody_can_have_written_are_not_known(tmp_path: Path, told: object) -> None:
    assert arrived(tmp_path, told).arrived is None


@pytest.mark.parametrize("host", [["here"], {}, 7, None])
def test_without_the_name_of_its_host_no_clock_is_compared(tmp_path: Path, host: Any) -> None:
    assert arrived(tmp_path, RISING, host).arrived is None
