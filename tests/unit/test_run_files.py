"""Files of a run folder, which other users may have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboard.run_files import (
    DOWNLOAD_LIMIT,
    SnapshotFile,
    file_content,
    snapshots,
    tail,
    too_large_to_download,
)


def test_snapshots_are_the_newest_regular_files_of_their_name(tmp_path: Path) -> None:
    assert snapshots(tmp_path) == snapshots(tmp_path / "absent") == []
    (tmp_path / "secret").write_bytes(b"no")
    (tmp_path / "snapshot-link.pickle").symlink_to(tmp_path / "secret")
    (tmp_path / "snapshot-folder.pickle").mkdir()
    names = ["snapshot-9.pickle", "snapshot-10.pickle"]
    for number, name in enumerate([*names, "snapshot-x", "a.pickle", "snapshot-\n.pickle"]):
        (tmp_path / name).write_bytes(b"abc")
        os.utime(tmp_path / name, (number, number))
    assert snapshots(tmp_path) == [SnapshotFile(tmp_path / name, 3) for name in names[::-1]]
    with pytest.raises(OSError, match="snapshot-link"):
        file_content(tmp_path / "snapshot-link.pickle")


def test_a_large_snapshot_is_not_read_into_the_pages_process(tmp_path: Path) -> None:
    path = tmp_path / "snapshot-step-7.pickle"
    path.touch()
    os.truncate(path, DOWNLOAD_LIMIT + 1)
    with pytest.raises(ValueError, match=f"too large .*{path}$"):
        file_content(path)
    assert too_large_to_download(path, DOWNLOAD_LIMIT) is None


def test_only_the_end_of_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("".join(f"line {n}\n" for n in range(10_000)))
    assert tail(path, 25) == "line 9998\nline 9999\n"
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent"):  # and does not wait for a writer of the pipe
        assert tail(tmp_path / name) is None
