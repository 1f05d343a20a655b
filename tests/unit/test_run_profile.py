"""Profiles in a run folder that anybody may have written, and what the page makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.charts.profile import rows, shown
from dashboard.run_files import (
    PROFILES,
    Profile,
    profile_of,
    profile_summary,
    profile_trace,
    profiles,
)
from stepscope.profiling.summary import BYTES_LIMIT, Summary, summarize, to_text
from tests.unit.test_profile_summary import MAIN, STEP, trace_of


def summary(*, cuda: bool = True) -> Summary:
    return summarize(trace_of(STEP), first=5, last=6, cuda=cuda, thread=MAIN)


def write(folder: Path, first: int, last: int) -> None:
    (folder / f"profile-step-{first}-{last}.summary.json").write_text(to_text(summary()))


def test_profiles_are_plain_files_of_their_name_the_newest_first(tmp_path: Path) -> None:
    write(tmp_path, 5, 6)
    write(tmp_path, 10, 12)
    (tmp_path / "profile-step-10-12.json.gz").write_bytes(b"trace")
    (tmp_path / "profile-step-007-8.summary.json").write_text("{}")
    (tmp_path / "profile-step-1-2.json.gz").write_bytes(b"without a summary")
    (tmp_path / "profile-x-1-2.summary.json").write_text("{}")
    (tmp_path / "profile-step-3-4.summary.json").symlink_to("profile-step-5-6.summary.json")
    (tmp_path / "profile-step-5-6.json.gz").symlink_to("profile-step-10-12.json.gz")
    assert profiles(tmp_path) == (Profile(10, 12, 5), Profile(5, 6, None))
    assert profiles(tmp_path / "absent") == ()
    assert profile_trace(tmp_path, Profile(10, 12, 5)) == b"trace"
    with pytest.raises(OSError, match="profile-step-5-6"):
        profile_trace(tmp_path, Profile(5, 6, 5))
    assert profile_of(tmp_path, 5, 6) == Profile(5, 6, None)
    with pytest.raises(ValueError, match="none of steps 3 to 4"):
        profile_of(tmp_path, 3, 4)


def test_no_more_than_so_many_are_listed(tmp_path: Path) -> None:
    for step in range(PROFILES + 5):
        write(tmp_path, step, step)
    assert [made.first for made in profiles(tmp_path)] == list(range(PROFILES + 4, 4, -1))


def test_a_summary_is_read_with_care(tmp_path: Path) -> None:
    made, path = Profile(5, 6, None), tmp_path / "profile-step-5-6.summary.json"
    write(tmp_path, 5, 6)
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


def test_parts_of_a_step_are_shares_and_seconds_a_step() -> None:
    answer = shown(summary())
    thread, gpu = answer["bars"]
    assert [part["name"] for part in thread["parts"]][:2] == ["data", "forward"]
    assert sum(part["share"] for part in thread["parts"]) == pytest.approx(1)
    assert thread["parts"][1]["seconds"] == pytest.approx(20e-6 / 2)  # two steps
    assert gpu["parts"][1]["share"] == pytest.approx(300 / 555)
    assert [bar["label"] for bar in shown(summary(cuda=False))["bars"]] == ["Training thread"]
    assert len(answer["flame"]["parent"]) == len(answer["flame"]["total_us"])
