"""Files of a run folder, which other users may have written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dashboard.run_files import (
    DOWNLOAD_LIMIT,
    SnapshotFile,
    file_content,
    keep_upload,
    pickles,
    snapshots,
    tail,
    too_large_to_download,
)


def test_snapshots_are_the_newest_regular_files_of_their_name(tmp_path: Path) -> None:
    assert snapshots(tmp_path) == pickles(tmp_path / "absent") == []
    (tmp_path / "secret").write_bytes(b"no")
    (tmp_path / "snapshot-link.pickle").symlink_to(tmp_path / "secret")
    (tmp_path / "snapshot-folder.pickle").mkdir()
    names = ["my file (ä).PICKLE", "snapshot-9.pickle", "a.pkl", "snapshot-10.pickle"]
    for number, name in enumerate([*names, "snapshot-x", ".hidden.pickle", "a\nb.pickle"]):
        (tmp_path / name).write_bytes(b"abc")
        os.utime(tmp_path / name, (number, number))
    assert [file.name for file in pickles(tmp_path)] == names[::-1]
    newest = [SnapshotFile(tmp_path / name, 3, tmp_path.name) for name in (names[3], names[1])]
    assert snapshots(tmp_path) == newest
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


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../x.pickle", "x"),
        ("ä ö.PKL", "snapshot"),
        ("a" * 300 + ".pickle", "a" * 100),
        ("run/../.snap\x00shot.pickle", "snap-shot"),
    ],
)
def test_an_upload_is_kept_under_a_plain_and_new_name(tmp_path: Path, name: str, kept: str) -> None:
    names = [keep_upload(tmp_path / "new", name, content) for content in (b"1", b"2", b"3")]
    assert all(re.fullmatch(rf"{kept}-[0-9a-f]{{6}}\.pickle", made) for made in names)
    assert [(tmp_path / "new" / made).read_bytes() for made in names] == [b"1", b"2", b"3"]
    assert {file.name for file in pickles(tmp_path / "new")} == set(names)
