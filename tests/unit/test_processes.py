"""Processes on a GPU: whose they are by /proc, what is kept of a command, and shares of time."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepscope.gpu.processes import (
    COMMAND_LIMIT,
    LOOK_AGAIN_S,
    REMEMBERED,
    Processes,
    program_of,
    sm_shares,
)
from tests.support.fake_nvml import FakeClock


def proc(root: Path, pid: int, state: str = "S", born: int = 100, name: str = "python") -> None:
    """Write what the kernel shows of a process."""
    folder = root / str(pid)
    folder.mkdir(exist_ok=True)
    rest = [state, *["0"] * 18, str(born), *["0"] * 20]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(rest)}")
    (folder / "cmdline").write_bytes(b"python\0train.py\0--lr\x000.1\0")


class Ticking:
    """A clock that goes on by a second at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def table_of(root: Path) -> Processes:
    return Processes(str(root), Ticking())


def test_a_process_has_a_name_a_command_and_a_user(tmp_path: Path) -> None:
    proc(tmp_path, 7, name="py) (thon")
    found = table_of(tmp_path).look(7)
    assert (found.name, found.command) == ("py) (thon", "python train.py --lr 0.1")
    assert found.user == pwd.getpwuid(os.getuid()).pw_name
    assert (found.yours, found.state) == (True, "running")


def test_this_process_is_found_in_the_real_proc() -> None:
    found = Processes().look(os.getpid())
    assert found.yours
    assert "pytest" in found.command or "python" in found.command


def test_another_users_process_is_not_yours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc(tmp_path, 7)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert not table_of(tmp_path).look(7).yours


def test_a_user_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    proc(tmp_path, 7)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert table_of(tmp_path).look(7).user == str(os.getuid())


def test_a_zombie_keeps_the_name_it_had(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    proc(tmp_path, 7)
    table.look(7)
    proc(tmp_path, 7, state="Z")
    (tmp_path / "7" / "cmdline").write_bytes(b"")
    found = table.look(7)
    assert (found.state, found.command) == ("zombie", "python train.py --lr 0.1")


def test_what_is_gone_keeps_its_name_too(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    proc(tmp_path, 7)
    table.look(7)
    (tmp_path / "7" / "stat").unlink()
    found = table.look(7)
    assert (found.state, found.name, found.yours) == ("gone", "python", True)


def test_what_was_never_seen_is_a_number(tmp_path: Path) -> None:
    found = table_of(tmp_path).look(99)
    assert (found.state, found.name, found.user, found.yours) == (
        "gone",
        "process 99",
        "unknown",
        False,
    )


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    proc(tmp_path, 7)
    table.look(7)
    proc(tmp_path, 7, born=200, name="other")
    (tmp_path / "7" / "cmdline").write_bytes(b"other\0")
    assert table.look(7).command == "other"


@pytest.mark.parametrize("text", ["", "7 (python)", "7 (python) S", "nonsense"])
def test_a_file_that_is_not_understood_is_no_process(tmp_path: Path, text: str) -> None:
    proc(tmp_path, 7)
    (tmp_path / "7" / "stat").write_text(text)
    assert table_of(tmp_path).look(7).state == "gone"


def test_a_command_is_cut_and_no_name_is_kept_for_ever(tmp_path: Path) -> None:
    proc(tmp_path, 1)
    (tmp_path / "1" / "cmdline").write_bytes(b"x" * 5000)
    table = table_of(tmp_path)
    assert table.look(1).command == "x" * COMMAND_LIMIT
    for pid in range(2, REMEMBERED + 3):
        proc(tmp_path, pid)
        table.look(pid)
    (tmp_path / "1" / "stat").unlink()
    assert table.look(1).name == "process 1"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("a.py --token abc", "a.py"),
        ("/usr/bin/python3.11 -u -W ignore train.py --password abc", "python3.11"),
        ("python train.py https://me:abc@host/x", "python train.py"),
        ("python -c login(token='abc')", "python"),
        ("python -cimport os;k='abc' arg", "python"),
        ("python -uc k='abc';run(k)", "python"),
        ("python -mmypkg.train --password abc", "python"),
        ("python - --token abc", "python"),
        ("python --api-key abc", "python"),
        ("python -X dev train.py", "python"),
        ("python -u -O /home/me/train.py --lr 1", "python train.py"),
        ("python -m", "python -m"),
        ("sh -c HF_TOKEN=abc python train.py", "sh"),
        ("python", "python"),
        ("", ""),
    ],
)
def test_a_program_is_named_without_its_arguments(command: str, shown: str) -> None:
    assert program_of(command) == shown


@dataclass
class Sample:
    """As NVML gives it."""

    pid: int
    timeStamp: int
    smUtil: int


def test_shares_are_the_newest_of_listed_processes() -> None:
    samples = [Sample(1, 5, 20), Sample(1, 9, 30), Sample(2, 8, 101), Sample(3, 3, 50)]
    samples += [Sample(77, 12, 40), Sample(1, 7, 99)]
    assert sm_shares(samples, {1, 2, 3, 4}, 4) == ({1: 30.0, 2: 0.0, 3: 0.0, 4: 0.0}, 12)


def test_without_a_fresh_sample_nothing_is_known() -> None:
    assert sm_shares([Sample(1, 4, 20)], {1}, 4) == ({}, 4)
    assert sm_shares([Sample(1, 5, 4_000_000_000)], {1}, 4) == ({}, 4)
    assert sm_shares([], {1}, 4) == ({}, 4)


def test_a_process_on_several_gpus_is_looked_up_once(tmp_path: Path) -> None:
    clock = FakeClock()
    table = Processes(str(tmp_path), clock)
    proc(tmp_path, 7)
    table.look(7)
    proc(tmp_path, 7, state="Z")
    assert table.look(7).state == "running"
    clock.now += LOOK_AGAIN_S
    assert table.look(7).state == "zombie"
