"""What a job's newest readings say of its collectives, by `stepscope diagnose` and in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.distributed.communication import NEWEST, STEPS, communication_text
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.session.session import Session
from tests.support.command_line import diagnose
from tests.support.fake_machine import FakeSource, Gpu, facts, info
from tests.support.recorded_runs import Row, write_run

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
        assert "link" not in session.recorder.described()
        session.describe_link(gpu.uuid)
        assert session.recorder.described().get("link") == kept
    finally:
        session.close(RunStatus.FINISHED)
