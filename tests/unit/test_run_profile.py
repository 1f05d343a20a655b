"""Profiles in a run folder that anybody may have written, and what the page makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard import run_files
from dashboard.run_files import ProfileFiles, file_content, profile_summary, profiles
from dashboard.views.run_tabs import operator_rows
from tests.support.profiles import summary, write_profile


def test_profiles_are_plain_files_of_their_name_the_newest_first(tmp_path: Path) -> None:
    write_profile(tmp_path, 5, 6)
    write_profile(tmp_path, 10, 12)
    (tmp_path / "profile-step-10-12.json.gz").write_bytes(b"trace")
    for name in ("step-007-8.summary.json", "step-1-2.json.gz", "x-1-2.summary.json"):
        (tmp_path / f"profile-{name}").touch()
    (tmp_path / "profile-step-3-4.summary.json").symlink_to("profile-step-5-6.summary.json")
    (tmp_path / "profile-step-5-6.json.gz").symlink_to("profile-step-10-12.json.gz")
    assert profiles(tmp_path) == (ProfileFiles(10, 12, 5), ProfileFiles(5, 6, None))
    assert profiles(tmp_path / "absent") == ()
    assert file_content(tmp_path / ProfileFiles(10, 12, 5).trace) == b"trace"
    with pytest.raises(OSError, match="profile-step-5-6"):
        file_content(tmp_path / ProfileFiles(5, 6, 5).trace)


def test_each_rank_has_its_own_profile_of_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (10, 2, 0):
        write_profile(tmp_path, 5, 6, rank)
    write_profile(tmp_path, 8, 9, 3)  # of this rank alone
    (tmp_path / "profile-step-5-6.rank2.json.gz").write_bytes(b"trace")
    for name in ("rank0", "rank02", "rank-1", "rank1x", "rank1234567", "rank٣"):
        (tmp_path / f"profile-step-5-6.{name}.summary.json").touch()
    (tmp_path / "profile-step-5-6.rank4.summary.json").symlink_to("profile-step-5-6.summary.json")
    assert profiles(tmp_path) == (
        ProfileFiles(8, 9, None, 3),
        ProfileFiles(5, 6, None),
        ProfileFiles(5, 6, 5, 2),
        ProfileFiles(5, 6, None, 10),
    )
    monkeypatch.setattr(run_files, "MAX_PROFILES", 2)
    assert [made.number for made in profiles(tmp_path)] == [3, 0]
    (tmp_path / "profile-step-5-6.rank10.summary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"profile-step-5-6\.rank10\.summary\.json: must be"):
        profile_summary(tmp_path, ProfileFiles(5, 6, None, 10))
    assert profile_summary(tmp_path, ProfileFiles(5, 6, 5, 2)) == summary()


def test_a_row_has_the_columns_that_were_recorded() -> None:
    row = operator_rows(summary())[0]
    assert (row["Name"], row["CUDA self"], row["CPU self"]) == ("aten::addmm", 0.3, 0.008)
    without_kernels = summary(cuda=False)
    assert [name for name in operator_rows(without_kernels)[0] if "CUDA" in name] == ["CUDA memory"]
