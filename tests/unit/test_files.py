"""Files of an untrusted folder: only regular files are opened, and no write follows a link."""

from __future__ import annotations

import errno
import fcntl
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.common import files
from stepscope.common.files import (
    atomic_replace,
    atomic_write,
    is_network_filesystem,
    open_for_append,
    open_regular_file,
    read_json,
    read_regular_file,
    try_lock,
)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "link to a device"])
def test_only_a_regular_file_is_read_up_to_its_limit(tmp_path: Path, kind: str) -> None:
    path, special = tmp_path / "file", tmp_path / "special"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_regular_file(path, 5) == b"12345"
    assert read_regular_file(tmp_path / "link", 5, follow_links=True) == b"12345"
    with pytest.raises(ValueError, match="at most 4"):
        read_regular_file(path, 4)
    if kind == "fifo":
        os.mkfifo(special)
    elif kind == "folder":
        special.mkdir()
    else:
        special.symlink_to("/etc/passwd" if kind == "link" else "/dev/zero")
    with pytest.raises(OSError):  # noqa: PT011 - each kind has its own errno
        os.close(open_regular_file(special, follow_links=kind == "link to a device"))


def test_a_replaced_file_is_complete_or_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")

    def fail() -> None:
        with atomic_replace(path) as file:
            file.write(b"ha")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert path.read_text() == "former"
    with atomic_replace(path) as file:
        file.write(b"new")
        assert path.read_text() == "former"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "new")]


def test_a_planted_link_receives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the name was `.run.json.PID.part`: a copied folder could hold a link of each PID."""
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("keep me")
    folder.mkdir()
    (folder / f".run.json.{os.getpid()}.part").symlink_to(victim)
    (folder / "run.json").symlink_to(victim)
    atomic_write(folder / "run.json", "{}")
    assert victim.read_text() == "keep me"
    assert (folder / "run.json").read_text() == "{}"

    # Even a name that was guessed is created, never opened.
    monkeypatch.setattr("secrets.token_hex", lambda _: "guess")
    (folder / ".run.json.guess.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic_write(folder / "run.json", "x")
    assert victim.read_text() == "keep me"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"{", None),
        (b"[" * 100_000, None),
        (b"[" * 60 + b"]" * 60, None),
        (b"[" + b"0," * 1_000_000 + b"0]", None),
        (b'"\xed\xa0\x80"', None),
        (b" " * 5_000_000, None),
        (rb'{"half \ud800": ["\udcff", "\ud83d\ude00"]}', {"half ?": ["?", "😀"]}),
        (f"[{10**400}, {-(10**400)}, {2**63}, 1]".encode(), [math.inf, -math.inf, 2**63, 1]),
    ],
)
def test_json_is_refused_or_encodable(tmp_path: Path, content: bytes, value: object) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    if value is not None:
        assert read_json(path, 4 * 2**20) == value
        return
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, or one that names the limit
        read_json(path, 4 * 2**20)


def test_nothing_is_appended_to_the_target_of_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError):  # noqa: PT011 - each kind has its own errno
            open_for_append(tmp_path / name, truncate=True)
    assert target.read_text() == "kept"
    for text in (b"one", b"two"):
        with open(open_for_append(target), "wb") as file:
            file.write(text)
    assert target.read_text() == "keptonetwo"
    os.close(open_for_append(target, truncate=True))
    assert target.read_text() == ""


LOCAL = ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk")
NETWORK = ("nfs4", "cifs", "lustre", "unknown", "9p", "fuse.sshfs", "fuse.fuse-overlayfs")


def test_an_unknown_file_system_is_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (*LOCAL, *NETWORK):
        other = "nfs4" if kind in LOCAL else "ext4"
        mounts = [("/", "ext2"), ("/", other), ("/mnt/my disk", kind), ("/data", "ext4")]
        found = [SimpleNamespace(mountpoint=point, fstype=name) for point, name in mounts]
        monkeypatch.setattr(files.psutil, "disk_partitions", lambda *, all, found=found: found)
        assert is_network_filesystem(Path("/mnt/my disk/runs/new")) == (kind in NETWORK), kind
        assert is_network_filesystem(Path("/mnt/my")) == (kind in LOCAL), kind


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_lock_is_exclusive_or_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(_file: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("r+b") as first, (tmp_path / "lock").open("r+b") as second:
        assert (try_lock(first.fileno()), try_lock(second.fileno())) == (True, False)
        monkeypatch.setattr(fcntl, "flock", no_locks)
        assert try_lock(second.fileno()) is None
