"""The ranks of a folder by its files, which others may have written or named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stepscope.run import rank_info as files
from stepscope.run import rank_json, write_run_json
from stepscope.run.rank_info import find_rank, numbers_with, rank_numbers, readable_ranks

NOT_OURS = ("rank0", "rank007", "rank-1", "rank", "rank1\n", "x/rank9", "rank\u0663", "rank1234567")


def write(folder: Path, number: int) -> None:
    told = {"status": "running", "heartbeat": time.time()}
    write_run_json(folder, told, rank_json(number), durable=False)


def test_only_names_that_we_write_are_ranks(tmp_path: Path) -> None:
    for number in (0, 2, 12, 1):
        write(tmp_path, number)
    (tmp_path / "x").mkdir()
    for name in NOT_OURS:
        (tmp_path / f"{name}.json").write_text("{}")
    for name in ("rank3.json.part", "xrank3.json", "rank3xjson", "rank0.sqlite"):
        (tmp_path / name).write_text("{}")
    assert rank_numbers(tmp_path) == [0, 1, 2, 12]
    assert [rank.number for rank in readable_ranks(tmp_path, 1)] == [1, 2, 12]
    assert numbers_with(tmp_path, "sqlite") == [0]
    assert rank_numbers(tmp_path / "absent") == [0]


def test_what_is_no_file_of_a_rank_is_left_out_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BYTES_LIMIT", 150_000)
    os.mkfifo(tmp_path / "rank1.json")
    (tmp_path / "rank2.json").mkdir()
    (tmp_path / "rank3.json").symlink_to("/dev/zero")
    for number, text in enumerate(("[" * 100_000, "[]", "\xff", " " * 200_000), 4):
        (tmp_path / rank_json(number)).write_text(text, encoding="latin-1")
    write(tmp_path, 8)
    (tmp_path / "rank9.json").symlink_to("rank8.json")
    opened = set(os.listdir("/proc/self/fd"))
    assert [rank.number for rank in readable_ranks(tmp_path, 1)] == [8, 9]
    assert find_rank(tmp_path, 0) is None
    assert set(os.listdir("/proc/self/fd")) <= opened  # a collection may close those of other tests
