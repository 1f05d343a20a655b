"""Profiles in a run folder that anybody may have written, and what the page makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dashboard.charts.profile import flame_figure, kind_of, parts_of_steps, rows
from dashboard.run_files import (
    PROFILED_RANKS,
    PROFILES,
    ProfileFiles,
    profile_summary,
    profile_trace,
    profiles,
)
from stepscope.profiling import summary_name
from stepscope.profiling.summary import BYTES_LIMIT
from stepscope.profiling.trace_stats import FlameGraph
from tests.support.profiles import summary, write_profile


def test_profiles_are_plain_files_of_their_name_the_newest_first(tmp_path: Path) -> None:
    write_profile(tmp_path, 5, 6)
    write_profile(tmp_path, 10, 12)
    (tmp_path / "profile-step-10-12.json.gz").write_bytes(b"trace")
    (tmp_path / "profile-step-007-8.summary.json").write_text("{}")
    (tmp_path / "profile-step-1-2.json.gz").write_bytes(b"without a summary")
    (tmp_path / "profile-x-1-2.summary.json").write_text("{}")
    (tmp_path / "profile-step-3-4.summary.json").symlink_to("profile-step-5-6.summary.json")
    (tmp_path / "profile-step-5-6.json.gz").symlink_to("profile-step-10-12.json.gz")
    assert profiles(tmp_path) == (ProfileFiles(10, 12, 5), ProfileFiles(5, 6, None))
    assert profiles(tmp_path / "absent") == ()
    assert profile_trace(tmp_path, ProfileFiles(10, 12, 5)) == b"trace"
    with pytest.raises(OSError, match="profile-step-5-6"):
        profile_trace(tmp_path, ProfileFiles(5, 6, 5))


def test_each_rank_has_its_own_profile_of_the_same_steps(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_profile(tmp_path, 5, 6, rank)
    write_profile(tmp_path, 8, 9, 3)  # of this rank alone
    (tmp_path / "profile-step-5-6.rank2.json.gz").write_bytes(b"trace")
    hostile = ("rank0", "rank02", "rank-1", "rank1x", "rank1234567", "rank1/../rank2", "rank٣")
    for name in hostile:
        (tmp_path / f"profile-step-5-6.{name.replace('/', '')}.summary.json").write_text("{}")
    (tmp_path / "profile-step-5-6.rank4.summary.json").symlink_to("profile-step-5-6.summary.json")
    assert profiles(tmp_path) == (
        ProfileFiles(8, 9, None, 3),
        ProfileFiles(5, 6, None),
        ProfileFiles(5, 6, 5, 2),
        ProfileFiles(5, 6, None, 10),
    )
    assert profile_trace(tmp_path, ProfileFiles(5, 6, 5, 2)) == b"trace"
    (tmp_path / "profile-step-5-6.rank10.summary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"profile-step-5-6\.rank10\.summary\.json: must be"):
        profile_summary(tmp_path, ProfileFiles(5, 6, None, 10))
    assert profile_summary(tmp_path, ProfileFiles(5, 6, 5, 2)) == summary()


def test_many_ranks_leave_no_older_profile_out(tmp_path: Path) -> None:
    for rank in range(PROFILED_RANKS + 5):
        (tmp_path / summary_name(5, 6, rank)).touch()
    (tmp_path / summary_name(1, 2)).touch()
    found = profiles(tmp_path)
    assert [made.number for made in found] == [*range(PROFILED_RANKS), 0]
    assert found[-1].first == 1


def test_no_more_than_so_many_are_listed(tmp_path: Path) -> None:
    for step in range(PROFILES + 5):
        write_profile(tmp_path, step, step)
    assert [made.first for made in profiles(tmp_path)] == list(range(PROFILES + 4, 4, -1))


def test_a_summary_is_read_with_care(tmp_path: Path) -> None:
    made, path = ProfileFiles(5, 6, None), tmp_path / "profile-step-5-6.summary.json"
    write_profile(tmp_path, 5, 6)
    assert profile_summary(tmp_path, made) == summary()
    path.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=r"profile-step-5-6\.summary\.json: is no JSON"):
        profile_summary(tmp_path, made)
    path.write_bytes(b" " * (BYTES_LIMIT + 1))
    with pytest.raises(ValueError, match="must have at most"):
        profile_summary(tmp_path, made)
    path.unlink()
    with pytest.raises(OSError, match="profile-step-5-6"):
        profile_summary(tmp_path, made)


def test_a_row_an_operator() -> None:
    row = rows(summary())[0]
    assert list(row) == [
        "Operator",
        "Calls",
        "CUDA self",
        "CUDA total",
        "CPU self",
        "CPU total",
        "CUDA memory",
        "CPU memory",
    ]
    assert (row["Operator"], row["CUDA self"], row["CPU self"]) == ("aten::addmm", 0.3, 0.008)
    assert row["CPU memory"] == 64 / 2**20
    assert [name for name in rows(summary(cuda=False))[0] if "CUDA" in name] == []


def test_parts_of_a_step_are_shares_and_times_per_step() -> None:
    thread, gpu = parts_of_steps(summary())
    assert re.match(r"\*\*Training thread, .*:\*\* :orange\[■\] data \d+% · [\d.]+ µs, ", thread)
    assert "forward 54% · 150 µs" in gpu
    assert len(parts_of_steps(summary(cuda=False))) == 1


def flame_of(parent: list[int], total_us: list[float], name: str = "f") -> Any:
    flame = FlameGraph([name], [0] * len(parent), parent, total_us, [1] * len(parent))
    [trace] = flame_figure(flame)["data"]
    return trace


def test_the_icicle_has_callers_first_and_leaves_out_what_is_too_small_to_see() -> None:
    trace = flame_of([-1, 0, 0, 2], [100, 60, 30, 0.01])
    assert trace["ids"] == ["0", "1", "2"]
    assert trace["parents"] == ["", "0", "0"]
    assert trace["values"] == [100, 60, 30]
    assert flame_of([-1, 0, 0], [10, 8, 30])["values"] == [10, 8, 2]  # never more than the caller
    assert flame_of([], [])["ids"] == []


def test_outer_functions_that_hold_nearly_all_are_not_drawn_at_first() -> None:
    assert flame_of([-1, 0, 1, 2, 3, 4], [9, 9, 9, 9, 5, 4])["level"] == "2"
    assert flame_of([-1, 0, 0], [9, 5, 4])["level"] == ""


def test_a_name_is_shown_as_it_is() -> None:
    assert flame_of([-1], [9], "<img src=x>")["labels"] == ["&lt;img src=x&gt;"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train.py(9): main", "Python"),
        ("nn.Module: Linear_0", "module"),
        ("<built-in method conv2d of type object>", "built-in function"),
        ("aten::addmm", "operator"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "operator"),
        ("AddmmBackward0", "operator"),
        ("backward", "operator"),
    ],
)
def test_functions_are_told_apart(name: str, kind: str) -> None:
    assert kind_of(name).name == kind
