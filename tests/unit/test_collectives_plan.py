"""Measurements of collectives: plans, sizes, refusals, files, text."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.collectives_results import ROW
from trainer.collectives.measurement import (
    HEADING,
    ResultError,
    closing,
    line,
    new_result_path,
    read_result,
    result_label,
    result_names,
    write_result,
)
from trainer.collectives.plan import GIB, NCCL, CollectivePlan, PlanError, parse_sizes, refusal

KEPT: dict[str, Any] = {"backend": "gloo", "ranks": 2, "rows": [ROW]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "mpi"}, "backend: gloo for CPUs or nccl for GPUs, got 'mpi'."),
        ({"ranks": 1}, "ranks: 2 to 64 processes, got 1."),
        ({"ranks": 65}, "ranks: 2 to 64 processes, got 65."),
        ({"operations": ()}, "got none."),
        ({"operations": ("all_reduce", "reduce")}, "got reduce."),
        ({"sizes": ()}, "sizes: 1 KiB to 16 GiB each"),
        ({"sizes": (512,)}, "sizes: 1 KiB to 16 GiB each"),
        ({"seconds": 0.0}, "seconds: 0.01 to 10 for each size, got 0.0."),
    ],
)
def test_a_plan_that_cannot_be_says_what_may(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        CollectivePlan(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "1X", "1K..", "4M..1K", "-1K", "1K;2K", "20G", "512"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(PlanError, match="^sizes: "):
        CollectivePlan(sizes=parse_sizes(text))


def test_nccl_needs_a_gpu_a_rank() -> None:
    plan = CollectivePlan(backend=NCCL, ranks=4)
    assert refusal(plan, 4, None) is None
    assert refusal(CollectivePlan(ranks=4), 0, "No driver.") is None
    assert "a GPU for each of the 4 ranks; found 1" in str(refusal(plan, 1, None))
    none = refusal(plan, 0, "torch is a CPU-only build.")
    assert "torch is a CPU-only build. Choose gloo" in str(none)


def test_files_are_kept_newest_first_and_read_back(tmp_path: Path) -> None:
    first = new_result_path(tmp_path, "gloo", 2)
    write_result(first, KEPT)
    second = new_result_path(tmp_path, "gloo", 2)
    assert second != first
    missing = {"operation": "broadcast", "bytes": 8, "reason": "no"}
    write_result(second, KEPT | {"rows": [ROW, missing]})
    assert result_names(tmp_path) == sorted([first.stem, second.stem], reverse=True)
    assert read_result(tmp_path, first.stem)["rows"] == [ROW]
    assert len(read_result(tmp_path, second.stem)["rows"]) == 2


@pytest.mark.parametrize("name", ["absent", "../run", "", "a/b", "."])
def test_a_name_of_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ResultError, match="does not exist"):
        read_result(tmp_path, name)


VALUES = [math.nan, math.inf, -math.inf, 0, -1.0, True, "1", [], 10**400, 1e-320]
KEYS = ("bytes", "seconds", "algorithm", "bus", "fastest_s", "slowest_s")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a measurement."""
    path = new_result_path(tmp_path, "gloo", 2)
    path.parent.mkdir()
    return path


def test_a_foreign_file_loses_its_invalid_rows(tmp_path: Path, path: Path) -> None:
    odd = [1, {}, {"operation": "all_reduce", "bytes": "4"}, ROW | {"bus": None}]
    odd += [ROW | {key: value} for key in KEYS for value in VALUES]
    odd += [{key: value for key, value in ROW.items() if key != "bus"}, ROW | {"reason": 3}]
    path.write_text(json.dumps(KEPT | {"rows": [*odd, ROW]}))
    assert read_result(tmp_path, path.stem)["rows"] == [ROW]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rows": 3}, "$.rows"),
        ({"ranks": None}, "$.ranks"),
        ({"ranks": True}, "$.ranks"),
        ({"ranks": 0}, "$.ranks"),
        ({"backend": 3}, "$.backend"),
        ({"machine": "x"}, "$.machine"),
        ({"machine": {"device": 3}}, "$.machine.device"),
        ({"machine": {"link": "fast"}}, "$.machine.link"),
        ({"machine": {"link": {"name": "PCIe", "bytes_per_s": math.inf}}}, "$.machine.link"),
        ({"machine": {"link": {"bytes_per_s": 1e9}}}, "$.machine.link"),
        ("{", ""),
        ("[]", ""),
        ("[" * 100_000, ""),
    ],
)
def test_another_file_is_refused(tmp_path: Path, path: Path, fields: Any, said: str) -> None:
    path.write_text(fields if isinstance(fields, str) else json.dumps(KEPT | fields))
    with pytest.raises(ResultError, match="Delete") as error:
        read_result(tmp_path, path.stem)
    assert said in str(error.value)


def test_labels_have_local_time(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, gloo, 2 ranks", result_label(path.stem))
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        for name, label in (
            ("20261122-141500-nccl-16-000", "2026-11-22 14:15:00, nccl, 16 ranks"),
            ("20261122-141500-nccl-16-001", "2026-11-22 14:15:00, nccl, 16 ranks (2)"),
            ("20261122-141500Z-nccl-16-000", "2026-11-22 19:45:00, nccl, 16 ranks"),
            ("of-somebody-else", "of-somebody-else"),
            ("20269922-141500-nccl-16-001", "20269922-141500-nccl-16-001"),
        ):
            assert result_label(name) == label
    finally:
        monkeypatch.undo()
        time.tzset()
    for machine in (None, {}, {"device": "CPU", "link": None}):
        write_result(path, KEPT | {"machine": machine})
        assert closing(read_result(tmp_path, path.stem))[0].startswith("2 ranks by gloo on ")


def test_lines_for_a_terminal() -> None:
    missing = {"operation": "all_reduce", "bytes": GIB, "reason": "no room"}
    assert line(missing).endswith("1.00 GiB  not measured: no room")
    assert len(line(ROW)) == len(HEADING)
    assert line(ROW | {"algorithm": 409e3, "bus": 0.1e9}).endswith("0.409 MB/s    0.100 GB/s")
    document = KEPT | {"backend": "nccl", "machine": {"device": "H100", "link": None}}
    assert closing(document) == ["2 ranks by nccl on H100."]
    document["machine"] = {"device": "H100", "link": {"name": "18 NVLinks", "bytes_per_s": 450e9}}
    assert closing(document) == ["2 ranks by nccl on H100, 18 NVLinks: 450 GB/s each way."]


def test_results_that_other_work_has_disturbed_are_counted() -> None:
    steady = ROW | {"fastest_s": 1e-3, "slowest_s": 3e-3}
    rows = [ROW, steady, ROW | {"fastest_s": 1e-3, "slowest_s": 3.1e-3}]
    missing = {"operation": "all_reduce", "bytes": GIB, "reason": "no room"}
    document = {"ranks": 2, "backend": "gloo", "rows": [*rows, missing]}
    assert closing(document)[1].startswith("Other work disturbed 1 of 3 results")
    assert len(closing(document | {"rows": rows[:2]})) == 1
