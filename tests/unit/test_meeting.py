"""Processes of one job on several hosts meet in one folder, and never in an earlier job's."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stepscope.distributed import rendezvous
from stepscope.distributed.rendezvous import (
    LINKS,
    START_ERROR_S,
    RankContext,
    find_place,
    is_shared,
    rendezvous_folder,
)
from stepscope.run.folder import own_start, start_above

JOB = ("sweep", "node1", "29500", "4", "0")


@pytest.fixture(autouse=True)
def just_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these processes has begun a second ago, as the ranks of a job have."""
    monkeypatch.setattr(rendezvous, "own_start", lambda: time.time() - 1.0)


def found(root: Path, number: int, gathered: float | None = None) -> Path:
    return rendezvous_folder(root, "a", JOB, number, gathered)


def begun_before(root: Path, age_s: float) -> None:
    for link in (root / LINKS).iterdir():
        then = time.time() - age_s
        os.utime(link, (then, then), follow_symlinks=False)


def test_many_that_come_at_once_find_one_folder(tmp_path: Path) -> None:
    together = threading.Barrier(16)

    def come(number: int) -> Path:
        together.wait()
        return rendezvous_folder(tmp_path, "train", JOB, number)

    with ThreadPoolExecutor(16) as pool:
        folders = set(pool.map(come, range(16)))
    assert len(folders) == 1
    [folder] = folders
    assert folder.is_dir()
    assert "-train-" in folder.name
    assert rendezvous_folder(tmp_path, "train", (*JOB[:4], "1"), 0) != folder, "another job's"


def test_a_name_used_again_later_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    """Also for ranks that had no file in the one of yesterday."""
    first = found(tmp_path, 0)
    begun_before(tmp_path, 24 * 3600.0)
    today = [found(tmp_path, number) for number in (3, 0, 1)]
    assert len(set(today)) == 1
    assert today[0] != first


def test_a_name_used_again_at_once_does_not_write_over_its_files(tmp_path: Path) -> None:
    first = found(tmp_path, 0)
    for number in (0, 1):
        (first / f"rank{number}.sqlite").touch()
    again = [found(tmp_path, number) for number in (0, 1)]
    assert again[0] == again[1] != first
    assert list(again[0].iterdir()) == []


def test_a_job_that_is_started_again_at_once_is_not_split(tmp_path: Path) -> None:
    """The first attempt got as far as rank 0's file; of the second one another rank asks first."""
    first = found(tmp_path, 0)
    (first / "rank0.sqlite").touch()
    begun_before(tmp_path, 20.0)
    agent_began = time.time() - 10.0
    again = [found(tmp_path, number, agent_began) for number in (8, 0, 9)]
    assert len(set(again)) == 1
    assert again[0] != first


def test_ranks_that_begin_as_soon_as_their_agents_meet(tmp_path: Path) -> None:
    """Starts of processes are known to a second: the first link may seem to come before."""
    agent_began = time.time() + 1.0
    folders = [found(tmp_path, number, agent_began) for number in range(3)]
    assert len(set(folders)) == 1


def test_a_rank_that_inits_late_still_finds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun with the others, and loaded its data for ten minutes."""
    first = found(tmp_path, 0)
    begun_before(tmp_path, 600.0)
    monkeypatch.setattr(rendezvous, "own_start", lambda: time.time() - 601.0)
    assert found(tmp_path, 1) == first


def test_hosts_whose_clocks_differ_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stamps the links, and the age of a process is by one clock."""
    first = found(tmp_path, 0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200.0)
    assert found(tmp_path, 1) == first


def test_a_link_leads_nowhere_but_under_the_root(tmp_path: Path) -> None:
    folder = found(tmp_path / "runs", 0)
    [link] = (tmp_path / "runs" / LINKS).iterdir()
    link.unlink()
    link.symlink_to("../../elsewhere")
    assert found(tmp_path / "runs", 0).parent == folder.parent


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("localhost", True),
        ("127.0.1.1", True),
        ("node1", True),
        ("node1.cluster.example", True),
        ("node2", False),
        ("node10", False),
        ("192.0.2.7", False),
        (None, False),
    ],
)
def test_rank_0_on_this_host_writes_on_this_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, here: bool
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(rendezvous, "is_network_filesystem", lambda _: False)
    assert is_shared(tmp_path, address) is here
    monkeypatch.setattr(rendezvous, "is_network_filesystem", lambda _: True)
    assert is_shared(tmp_path, address)


# --- the places of a job's ranks -----------------------------------------------------------------


def rank(number: int, **more: str) -> dict[str, str]:
    """torchrun's environment of a rank of two nodes with two processes each."""
    numbers = {"RANK": number, "LOCAL_RANK": number % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    job = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "sweep"}
    return {key: str(value) for key, value in numbers.items()} | job | more


def places(
    root: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, **more: str
) -> list[RankContext]:
    monkeypatch.setattr(rendezvous, "is_network_filesystem", lambda _: shared)
    placed = []
    for number in (3, 2, 0, 1):  # in any order
        host = f"node{number // 2 + 1}"
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        place = find_place(root, "train", rank(number, **more))
        (place.folder / f"rank{place.number}.sqlite").touch()
        placed.append(place)
    return sorted(placed, key=lambda place: place.rank)


def test_two_nodes_with_a_shared_disk_have_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = places(tmp_path, monkeypatch, True)
    assert len({place.folder for place in found}) == 1
    assert [place.number for place in found] == [0, 1, 2, 3]
    assert {place.folder_of for place in found} == {"job"}
    restarted = places(tmp_path, monkeypatch, True, TORCHELASTIC_RESTART_COUNT="1")
    assert len({place.folder for place in [*found, *restarted]}) == 2


def test_ranks_of_torchrun_tell_when_their_agent_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = places(tmp_path, monkeypatch, True)
    for file in first[0].folder.glob("rank[123].*"):
        file.unlink()  # the first attempt got no further
    begun_before(tmp_path, 20.0)
    starts = {"TORCHELASTIC_RUN_ID": time.time() - 10.0}
    monkeypatch.setattr(rendezvous, "start_above", starts.__getitem__)
    again = places(tmp_path, monkeypatch, True)
    assert len({place.folder for place in again}) == 1
    assert again[0].folder != first[0].folder


def test_the_launcher_is_found_behind_a_shell_of_the_user() -> None:
    """All below this process, the shell included, have the variable that it sets."""
    program = "from stepscope.run.folder import start_above; print(start_above('JOB_MARK'))"
    shell = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}; exit $?"
    environ = os.environ | {"JOB_MARK": "sweep"}
    found = subprocess.run(["sh", "-c", shell], env=environ, capture_output=True, check=True)
    assert float(found.stdout) == pytest.approx(own_start(), abs=START_ERROR_S)


def test_a_launcher_that_cannot_be_seen_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "environ", refused)
    assert start_above("JOB_MARK") is None


def test_other_launchers_wait_for_nobody_and_may_begin_later_than_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher of one host starts its ranks before that of another has begun."""
    monkeypatch.setattr(rendezvous, "is_network_filesystem", lambda _: True)
    monkeypatch.setattr(rendezvous, "start_above", lambda _: time.time())
    found = []
    for number in (3, 0):
        environ = rank(number)
        del environ["TORCHELASTIC_RUN_ID"]
        found.append(find_place(tmp_path, "train", environ))
        begun_before(tmp_path, 20.0)
    assert found[0].folder == found[1].folder


def test_two_nodes_without_one_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = places(tmp_path, monkeypatch, False)[2:]
    assert len({place.folder for place in found}) == 1
    assert [(place.number, place.rank) for place in found] == [(0, 2), (1, 3)]
    assert {place.folder_of for place in found} == {"host"}


def test_a_named_run_used_again_has_a_folder_for_all_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = places(tmp_path, monkeypatch, False, STEPSCOPE_RUN_ID="mine")
    again = places(tmp_path, monkeypatch, False, STEPSCOPE_RUN_ID="mine")
    assert {place.folder.name for place in first} == {"mine"}
    assert len({place.folder for place in [*first, *again]}) == 2
    restarted = {"STEPSCOPE_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "1"}
    found = places(tmp_path, monkeypatch, False, **restarted)
    assert {place.folder.name for place in found} == {"mine-restart1"}
