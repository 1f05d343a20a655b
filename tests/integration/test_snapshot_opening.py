"""Snapshots opened in processes of their own, with limits; and `stepscope snapshot`."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stepscope.cli import main
from stepscope.memory.snapshots import open_snapshot as opening
from stepscope.memory.snapshots.load import SnapshotError
from stepscope.memory.snapshots.open_snapshot import (
    SnapshotLoadTask,
    kept_summary,
    open_snapshot,
    summary_path,
)
from tests.support.snapshots import REAL, live_block, snapshot
from tests.support.waiting import wait_for


@pytest.fixture
def real(tmp_path: Path) -> Path:
    return Path(shutil.copy(REAL, tmp_path / "snapshot-step-3.pickle"))


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    folder = tmp_path / "spare"
    folder.mkdir()
    return folder


def test_a_snapshot_is_opened_once(real: Path, spare: Path) -> None:
    first = open_snapshot(real, spare)
    assert first.devices[0].parts.allocated == 34_790_912
    kept = summary_path(real)
    made = kept.stat().st_mtime_ns
    again = SnapshotLoadTask(real, spare, kept_summary(real, spare))
    assert again.summary == first  # at once: no process
    assert kept.stat().st_mtime_ns == made
    os.utime(real, ns=(1, 1))
    later = SnapshotLoadTask(real, spare, kept_summary(real, spare))
    assert later.summary is None
    later.close()


def test_where_the_folder_cannot_be_written_the_summary_goes_elsewhere(
    real: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert open_snapshot(real, spare).sites
    assert not summary_path(real).exists()
    assert len(list(spare.iterdir())) == 1
    assert kept_summary(real, spare) is not None


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
def test_a_hostile_file_ends_its_own_process_and_nothing_else(
    tmp_path: Path, spare: Path, name: str
) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="hostile.pickle: ") as caught:
        open_snapshot(path, spare)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(spare.iterdir()) == []
    assert not summary_path(path).exists()


def test_a_process_that_takes_too_long_is_ended(
    real: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MAX_WALL_S", 0.0)
    with pytest.raises(SnapshotError, match="0 s"):
        open_snapshot(real, spare)


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


def test_the_command_prints_totals_history_and_allocations(
    real: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(real), "--top", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for size in ("36.0 MiB", "33.2 MiB", "2.00 MiB", "34.0 MiB"):
        assert size in out
    for place in ("record_snapshot.py:31", "linear.py:134", "torch.nn.modules.linear"):
        assert place in out
    assert "further stacks" in out


@pytest.mark.parametrize("top", ["1", "10000"])
def test_what_is_not_listed_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], top: str
) -> None:
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps(snapshot([live_block(512, line) for line in range(1, 2101)])))
    assert main(["snapshot", str(path), "--top", top]) == 0
    left = 2099 if top == "1" else 100
    assert f"  {left:,} further stacks" in capsys.readouterr().out


def test_two_files_are_compared(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pickle"
    other.write_bytes(pickle.dumps(snapshot([live_block(2**20)])))
    assert main(["snapshot", str(real), str(other)]) == 0
    out = capsys.readouterr().out
    for size in ("33.2 MiB", "1.00 MiB", "-32.2 MiB", "+1.00 MiB"):
        assert size in out
    assert "net.py:7" in out
    assert main(["snapshot", str(real), str(real)]) == 0
    assert "net.py:7" not in capsys.readouterr().out


def test_as_json_it_has_whole_stacks(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(real), str(real), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [device] = found["devices"]
    parts = ("allocated", "awaiting_free", "cached", "split")
    assert device["reserved"] == sum(device[part] for part in parts) == 37_748_736
    assert found["allocations"][0]["frames"][0].endswith("linear.py:134 in forward")
    assert found["histories"][0]["end"] == 34_787_192
    assert found["difference"] == {
        "before": 34_790_912,
        "after": 34_790_912,
        "complete": True,
        "changes": [],
    }


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
