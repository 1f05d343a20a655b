"""Snapshots opened in processes of their own, with limits; and `stepscope snapshot`."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stepscope.cli import main
from stepscope.memory.snapshots import open_snapshot as opening
from stepscope.memory.snapshots.open_snapshot import SnapshotError, open_snapshot
from tests.support.snapshots import REAL, live_block, snapshot
from tests.support.waiting import wait_for

HOSTILE = {
    # A memo with place for 2^31 objects: 32 GB.
    "memory": (b"\x80\x04}r\xff\xff\xff\x7f.", "more"),
    # Hashing a tuple in a tuple in a tuple … overruns the stack of the process.
    "crash": (b"\x80\x04})" + b"\x85" * 3_000_000 + b"K\x01s.", "broke the process"),
    "call": (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
    # No more than a machine has, but more than the process may have.
    "limit": (b"\x80\x05\x96" + struct.pack("<Q", 2**32) + b"x.", "more"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_its_own_process_and_nothing_else(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="hostile.pickle: ") as caught:
        open_snapshot(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "MAX_WALL_S", 0.0)
    with pytest.raises(SnapshotError, match="0 s"):
        open_snapshot(REAL)


def test_the_process_ends_with_the_command_that_has_started_it(tmp_path: Path) -> None:
    """Hashing a pair of a pair of a pair … takes for ever and lets no other thread run."""
    pairs = b"".join(b"h%ch%c\x86\x940" % (number, number) for number in range(60))
    path = tmp_path / "endless.pickle"
    path.write_bytes(b"\x80\x04K\x01\x85\x940" + pairs + b"}h\x3cK\x01s.")
    with subprocess.Popen(
        [sys.executable, "-m", "stepscope.cli", "snapshot", str(path)]
    ) as command:
        [reader] = wait_for(psutil.Process(command.pid).children)
        wait_for(lambda: reader.cpu_times().user > 1.5)
        command.kill()
    assert psutil.wait_procs([reader], 5)[1] == []


# --- stepscope snapshot ---------------------------------------------------------------------------


def test_the_command_lists_live_allocations_by_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(REAL), "--top", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("33.2 MiB", "36.0 MiB", "32.0 MiB", "record_snapshot.py:31", "linear.py:134"):
        assert text in out
    assert "5 further stacks" in out
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps(snapshot([live_block(512, line) for line in range(1, 1101)])))
    assert main(["snapshot", str(path), "--top", "10000"]) == 0
    assert "50.0 KiB          100 further stacks" in capsys.readouterr().out


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.pickle"
    other.write_bytes(pickle.dumps(snapshot([live_block(2**20)])))
    assert main(["snapshot", str(REAL), str(other)]) == 0
    out = capsys.readouterr().out
    for text in ("33.2 MiB", "1.00 MiB", "-32.2 MiB", "+1.00 MiB", "net.py:7"):
        assert text in out


def test_what_cannot_be_opened_is_one_sentence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(tmp_path / "absent.pickle")]) == 1
    assert os.strerror(errno.ENOENT) in capsys.readouterr().err
    for folder in ("", "/", str(tmp_path)):
        assert main(["snapshot", folder]) == 1
        assert "must be a" in capsys.readouterr().err
    path = tmp_path / "bad\x1b[31m.pickle"
    path.write_bytes(HOSTILE["call"][0])
    assert main(["snapshot", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "os.system" in err
    assert "\x1b" not in err
    with pytest.raises(SystemExit):
        main(["snapshot", str(path), "--top", "0"])
