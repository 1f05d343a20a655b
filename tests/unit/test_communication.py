"""What collectives cost: links by what the driver tells, shares, and the sentences about them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stepscope.distributed.collective_metrics import algorithm_bytes, bus_factor
from stepscope.distributed.communication import (
    NEWEST,
    STEPS,
    Interconnect,
    communication_text,
    link_of,
    sentences,
)
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.session.session import Session
from tests.support.command_line import diagnose
from tests.support.fake_machine import FakeSource, Gpu, facts, info
from tests.support.recorded_runs import Row, write_run

H100 = {"nvlinks": 18, "nvlink_speed": 26_562e6, "pcie_max_gen": 5, "pcie_max_width": 16}


def test_nvlink_counts_all_links_that_are_up() -> None:
    assert link_of(H100) == Interconnect("18 NVLinks", 18 * 26_562e6)
    assert link_of({"nvlinks": 1, "nvlink_speed": 14e9}) == Interconnect("1 NVLink", 14e9)
    assert link_of(H100 | {"nvlink_speed": None}) is None, "not PCIe"


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    # The usual figures for one direction, such as 31.5 GB/s for PCIe 4.0 x16.
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.75), (4, 16, 31.5), (5, 8, 31.5), (6, 16, 121.0)],
)
def test_pcie_by_generation_and_width(generation: int, width: int, gigabytes: float) -> None:
    link = link_of({"nvlinks": 0, "pcie_max_gen": generation, "pcie_max_width": width})
    assert link is not None
    assert link.bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.002)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"pcie_max_gen": 9, "pcie_max_width": 16},
        {"pcie_max_gen": 4, "pcie_max_width": None},
        # Not as a driver tells it: a run's file may have been written by others.
        {"pcie_max_gen": 4, "pcie_max_width": "x"},
        {"pcie_max_gen": 4, "pcie_max_width": -16},
        {"pcie_max_gen": True, "pcie_max_width": 16},
        {"nvlinks": "x", "nvlink_speed": 2},
        {"nvlinks": -18, "nvlink_speed": 25e9},
        {"nvlinks": 10**400, "nvlink_speed": 25e9},
        {"nvlinks": 18, "nvlink_speed": []},
        {"nvlinks": 18, "nvlink_speed": -1.0},
        {"nvlinks": 18, "nvlink_speed": 1e308},
        {"nvlinks": 18, "nvlink_speed": math.nan},
    ],
)
def test_an_unknown_link_is_none(facts: dict[str, object]) -> None:
    assert link_of(facts) is None


def test_all_is_said_that_is_known() -> None:
    means = {"comm/bytes": 100 * 2**20, "comm/rate": 2 * 2**30, "comm/bus_bandwidth": 239e9}
    means |= {"comm/time": 0.012, "perf/step_time": 0.048, "perf/comm_wait": 0.003}
    passes, device, overlap, bandwidth = sentences(means, link_of(H100))
    assert passes == "Each step passes 100 MiB to collectives, 2.00 GiB a second."
    assert "12.0 ms per step in them, 25% of its 48.0 ms" in device
    assert overlap == "75% of that overlaps with the backward pass."
    assert "239 GB/s bus bandwidth, 50% of the peak of 18 NVLinks (478 GB/s)." in bandwidth
    assert bandwidth.endswith("They wait for other ranks, or do not go over this link.")


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert sentences({}) == []
    assert sentences({"comm/bytes": 512.0}) == ["Each step passes 512 B to collectives."]
    (said,) = sentences({"comm/bus_bandwidth": 1e9})
    assert "; the link's peak is unknown." in said
    little = {"comm/time": 0.001, "perf/step_time": 0.1, "perf/comm_wait": 0.0}
    assert len(sentences(little)) == 1


LINK = {"nvlinks": 18, "nvlink_speed": 25e9, "pcie_max_gen": 5, "pcie_max_width": 16}
SAID = (
    "Communication of rank 0: Each step passes 100 MiB to collectives, 2.00 GiB a "
    "second. The device spends 10.0 ms per step in them, 25% of its 40.0 ms, "
    "including waiting for other ranks. 70% of that overlaps with the backward "
    "pass. Large collectives reach 360 GB/s bus bandwidth, 80% of the peak of 18 "
    "NVLinks (450 GB/s)."
)


def job(folder: Path, **run_json: Any) -> Path:
    """A job whose first readings and steps were others; between readings the sampler has none."""
    steps: list[Row] = [(0.04 * i, i, {"perf/step_time": 9.0}) for i in range(100)]
    new = {"perf/step_time": 0.04, "perf/comm_wait": 0.003}
    steps += [(0.04 * i, i, new) for i in range(100, 100 + STEPS)]
    read = {
        "comm/bytes": 100.0 * 2**20,
        "comm/rate": 2.0 * 2**30,
        "comm/time": 0.01,
        "comm/bus_bandwidth": 360e9,
    }
    samples: list[Row] = [(0.1 * i, 0, {"process/cpu": 50.0}) for i in range(100 + 10 * NEWEST)]
    for i in range(0, len(samples), 10):
        samples[i][2].update(read if i >= 100 else {"comm/bytes": 1.0})
    told = {"world_size": 2, "rank": 0, "device": "cpu", "link": LINK} | run_json
    return write_run(folder, told, steps=steps, samples=samples)


def test_the_newest_readings_and_steps_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path / "job")
    assert communication_text(read_run(folder)) == SAID
    out, _ = diagnose(capsys, str(folder))
    assert out.splitlines()[-1] == SAID
    out, _ = diagnose(capsys, str(folder), "--json")
    note = json.loads(out)[-1]
    assert (note["kind"], note["rank"], note["phase"]) == ("note", 0, "communication")
    assert (note["text"], note["next"]) == (SAID, None)


def test_nothing_is_said_of_a_process_by_itself_or_without_readings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert communication_text(read_run(job(tmp_path / "alone", world_size=1))) is None
    steps: list[Row] = [(0.1 * i, i, {"perf/step_time": 0.1}) for i in range(60)]
    silent = write_run(tmp_path / "silent", {"world_size": 2, "device": "cpu"}, steps=steps)
    assert communication_text(read_run(silent)) is None
    out, _ = diagnose(capsys, str(silent), "--json")
    assert "note" not in [finding["kind"] for finding in json.loads(out)]


@pytest.mark.parametrize("link", [None, "fast", {"nvlinks": 18}])
def test_without_a_link_the_bandwidth_stands_alone(tmp_path: Path, link: object) -> None:
    said = communication_text(read_run(job(tmp_path / "job", link=link)))
    assert said is not None
    assert said.endswith("collectives reach 360 GB/s bus bandwidth; the link's peak is unknown.")


@pytest.mark.parametrize(("ranks", "kept"), [(2, LINK), (1, None)])
def test_a_job_writes_down_the_link_of_its_gpu(
    tmp_path: Path, ranks: int, kept: dict[str, float] | None
) -> None:
    gpu = info()
    session = Session(tmp_path, name="job", kind=RunKind.WATCH)
    try:
        session.recorder.describe(world_size=ranks)
        session.sample(
            FakeSource([Gpu(gpu, facts=facts(gpu, **LINK))]), [], host=False, start=False
        )
        session.describe_link(None)
        assert "link" not in session.recorder.run_json
        session.describe_link(gpu.uuid)
        assert session.recorder.run_json.get("link") == kept
    finally:
        session.close(RunStatus.FINISHED)


MIB = 2**20


FACTORS = [
    ("all_reduce", 2 * 7 / 8),
    ("allreduce_coalesced", 2 * 7 / 8),
    ("reduce_scatter", 7 / 8),
    ("_reduce_scatter_base", 7 / 8),
    ("reduce_scatter_tensor_coalesced", 7 / 8),
    ("all_gather", 7 / 8),
    ("_all_gather_base", 7 / 8),
    ("all_gather_into_tensor_coalesced", 7 / 8),
    ("all_to_all", 7 / 8),
    ("gather", 7 / 8),
    ("scatter", 7 / 8),
    ("broadcast", 1.0),
    ("reduce", 1.0),
    ("all_reduce_barrier", None),
    ("send 0->1", None),
    ("coalesced", None),
]


def test_the_factor_of_eight_ranks(subtests: pytest.Subtests) -> None:
    for operation, factor in FACTORS:
        with subtests.test(operation):
            assert bus_factor(operation, 8) == factor


def test_the_factor_of_few_ranks() -> None:
    assert [bus_factor("all_reduce", ranks) for ranks in (0, 1, 2)] == [None, None, 1.0]


def test_the_size_is_that_of_the_whole_array() -> None:
    assert algorithm_bytes("_all_gather_base", MIB, 8 * MIB) == 8 * MIB
    assert algorithm_bytes("_reduce_scatter_base", 8 * MIB, MIB) == 8 * MIB
    assert algorithm_bytes("all_reduce", MIB, MIB) == MIB
    assert algorithm_bytes("all_to_all", 4 * MIB, 4 * MIB) == 4 * MIB
