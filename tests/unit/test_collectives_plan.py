"""Measurements of collectives: plans, sizes, refusals, files, text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.collectives_results import ROW
from trainer.collectives.measurement import (
    GIB,
    NCCL,
    CollectivePlan,
    PlanError,
    ResultError,
    closing,
    new_result_path,
    parse_sizes,
    read_result,
    refusal,
    result_names,
    terminal_text,
    write_result,
)

MISSING = {"operation": "all_reduce", "bytes": GIB, "reason": "no room"}
KEPT: dict[str, Any] = {"backend": "gloo", "ranks": 2, "rows": [ROW, MISSING]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "mpi"}, "backend: gloo for CPUs or nccl for GPUs, got 'mpi'."),
        ({"ranks": 1}, "ranks: 2 to 64 processes, got 1."),
        ({"ranks": 65}, "ranks: 2 to 64 processes, got 65."),
        ({"sizes": ()}, "sizes: 1 KiB to 16 GiB each"),
        ({"sizes": (512,)}, "sizes: 1 KiB to 16 GiB each"),
    ],
)
def test_a_plan_that_cannot_be_says_what_may(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        CollectivePlan(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "1X", "1K..", "4M..1K", "-1K", "1K;2K", "20G", "512"])
def test_invalid_sizes(text: str) -> None:
    assert parse_sizes("1K..20K") == (1024, 4096, 16384)
    assert parse_sizes("1K, 3M") == (1024, 3 * 2**20)
    with pytest.raises(PlanError, match="^sizes: "):
        CollectivePlan(sizes=parse_sizes(text))


def test_nccl_needs_a_gpu_a_rank() -> None:
    plan = CollectivePlan(backend=NCCL, ranks=4)
    assert refusal(plan, 4, None) is None
    assert refusal(CollectivePlan(ranks=4), 0, "No driver.") is None
    said = "NCCL needs a GPU for each of the 4 ranks; found"
    assert refusal(plan, 1, None) == f"{said} 1. Reduce the ranks."
    assert refusal(plan, 0, "No driver.") == f"{said} 0. No driver."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a measurement."""
    path = new_result_path(tmp_path, "gloo", 2)
    write_result(path, KEPT)
    return path


def test_files_are_kept_newest_first_and_read_back(tmp_path: Path, path: Path) -> None:
    later = path.with_stem(f"2999{path.stem[4:]}")
    write_result(later, KEPT | {"machine": None})
    assert new_result_path(tmp_path, "gloo", 2) not in (path, later)
    assert result_names(tmp_path) == [later.stem, path.stem]
    assert [read_result(tmp_path, name)["rows"] for name in result_names(tmp_path)] == [
        KEPT["rows"]
    ] * 2


@pytest.mark.parametrize("name", ["absent", "../run", "", "a/b", "."])
def test_a_name_of_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ResultError, match="does not exist"):
        read_result(tmp_path, name)


VALUES = [math.nan, math.inf, -math.inf, 0, -1.0, True, "1", [], 10**400, 1e-320, None]
KEYS = ("bytes", "seconds", "algorithm", "bus", "fastest_s", "slowest_s")
BAD_ROWS = [1, {}, MISSING | {"reason": 3}, MISSING | {"bus": 1.0}, ROW | {"reason": ""}]
BAD_ROWS += [{key: value for key, value in ROW.items() if key != "bus"}]
BAD_ROWS += [ROW | {key: value} for key in KEYS for value in VALUES]
OTHERS = [
    ({"rows": 3}, "$.rows"),
    *(({"rows": [ROW, row]}, "$.rows") for row in BAD_ROWS),
    *(({"ranks": value}, "$.ranks") for value in (None, True, 0)),
    ({"backend": 3}, "$.backend"),
    ({"machine": "x"}, "$.machine"),
    ({"machine": {"device": 3}}, "$.machine.device"),
    ({"machine": {"link": "fast"}}, "$.machine.link"),
    ({"machine": {"link": {"name": "PCIe", "bytes_per_s": math.inf}}}, "$.machine.link"),
    ({"machine": {"link": {"bytes_per_s": 1e9}}}, "$.machine.link"),
    *((text, "") for text in ("{", "[]", "[" * 100_000)),
]


def test_another_file_is_refused(tmp_path: Path, path: Path) -> None:
    for fields, said in OTHERS:
        path.write_text(fields if isinstance(fields, str) else json.dumps(KEPT | fields))
        with pytest.raises(ResultError, match="Delete") as error:
            read_result(tmp_path, path.stem)
        assert said in str(error.value)


def test_text_for_a_terminal() -> None:
    document = KEPT | {"backend": "nccl", "machine": {"device": "H100", "link": None}}
    heading, row, missing, last = terminal_text(document).splitlines()
    assert len(row) == len(heading)
    assert missing.endswith("1.00 GiB  not measured: no room")
    assert last == closing(document) == "2 ranks by nccl on H100."
    document["machine"] = {"device": "H100", "link": {"name": "18 NVLinks", "bytes_per_s": 450e9}}
    assert closing(document) == "2 ranks by nccl on H100, 18 NVLinks: 450 GB/s each way."
    document["machine"] = {"device": "Simulated GPU", "simulated": True}
    assert "not those of a GPU" in terminal_text(document)
    for machine in (None, {}):
        assert closing(KEPT | {"machine": machine}).startswith("2 ranks by gloo on ")
