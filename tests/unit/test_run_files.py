"""Files of a run folder that anybody may have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboard.format import escape_markdown
from dashboard.run_files import (
    DOWNLOAD_LIMIT,
    SnapshotDownload,
    snapshot_content,
    snapshots,
    tail,
    too_large_to_download,
)


def test_snapshots_are_plain_files_of_their_name(tmp_path: Path) -> None:
    (tmp_path / "snapshot-step-7.pickle").write_bytes(b"abc")
    (tmp_path / "snapshot-x").write_bytes(b"no")
    (tmp_path / "secret").write_bytes(b"no")
    (tmp_path / "snapshot-link.pickle").symlink_to(tmp_path / "secret")
    (tmp_path / "snapshot-folder.pickle").mkdir()
    assert snapshots(tmp_path) == (SnapshotDownload("snapshot-step-7.pickle", 3),)
    assert snapshot_content(tmp_path / "snapshot-step-7.pickle") == b"abc"
    assert snapshots(tmp_path / "absent") == ()
    with pytest.raises(OSError, match="snapshot-link"):
        snapshot_content(tmp_path / "snapshot-link.pickle")


def test_of_many_snapshots_the_newest_are_listed(tmp_path: Path) -> None:
    for step in range(1, 120):
        (tmp_path / f"snapshot-step-{step}.pickle").write_bytes(b"x")
    names = [found.name for found in snapshots(tmp_path)]
    assert names == [f"snapshot-step-{step}.pickle" for step in range(70, 120)]


def test_a_large_snapshot_is_not_read_into_the_pages_process(tmp_path: Path) -> None:
    path = tmp_path / "snapshot-step-7.pickle"
    path.touch()
    os.truncate(path, DOWNLOAD_LIMIT + 1)
    with pytest.raises(ValueError, match=rf"too large to download here.* from {path}$"):
        snapshot_content(path)
    assert too_large_to_download(path, DOWNLOAD_LIMIT) is None


def test_only_the_end_of_a_long_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("".join(f"line {n}\n" for n in range(10_000)))
    text = tail(path, 200)
    assert text is not None
    assert text.splitlines()[-1] == "line 9999"
    assert text.splitlines()[0].startswith("line ")
    assert len(text) <= 200


def test_neither_a_link_nor_a_pipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "output.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "output.log") is None
    assert tail(tmp_path / "pipe") is None  # and does not wait for a writer
    assert tail(tmp_path / "absent") is None


def test_plain_text_has_no_markdown() -> None:
    assert escape_markdown("a_b [x](y)") == r"a\_b \[x\](y)"
