"""What `stepscope watch` is made of: the kept output, the place of a rank, how a script ended."""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.common.formatting import terminal_text
from stepscope.distributed.rendezvous import LauncherEnv, RankEnvironmentError, find_place, launch
from stepscope.gpu.device_info import DeviceInfo
from stepscope.run import RunStatus
from stepscope.run.status import outcome
from stepscope.session.script_session import visible_gpus
from stepscope.watch.main import _parse, main
from stepscope.watch.output_log import OutputLog
from tests.support.fake_machine import info


class Terminal:
    """A text stream over a real file, as sys.stdout is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = io.FileIO(path, "w")
        self.stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def shows(self) -> str:
        self.stream.flush()
        return self.path.read_text(encoding="utf-8")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "terminal")
    yield terminal
    terminal.stream.close()


def test_what_a_stream_writes_is_kept_and_shown_also_if_the_disk_takes_it_in_parts(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OutputLog(tmp_path / "output.log", failed=pytest.fail)
    assert log.keep(terminal.stream) is None
    assert "StringIO" in str(log.keep(io.StringIO())), "no file of this process"
    to_log = os.write
    monkeypatch.setattr(os, "write", lambda file, data: to_log(file, data[:3]))
    terminal.stream.write("loss 0.5 é\nloss 0.4\n")
    assert terminal.shows() == "loss 0.5 é\nloss 0.4\n"
    assert (tmp_path / "output.log").read_text(encoding="utf-8") == "loss 0.5 é\nloss 0.4\n"


def test_a_full_log_keeps_the_newest_output(tmp_path: Path, terminal: Terminal) -> None:
    log = OutputLog(tmp_path / "output.log", failed=pytest.fail, limit=100)
    log.keep(terminal.stream)
    for number in range(50):
        terminal.stream.write(f"line {number:04}\n")
        terminal.stream.flush()
    kept = (tmp_path / "output.1.log").read_text() + (tmp_path / "output.log").read_text()
    assert 100 <= len(kept) <= 200
    assert terminal.shows().endswith(kept)


@pytest.mark.parametrize("target", ["own", "/dev/full"])
def test_a_log_that_cannot_be_written_leaves_the_terminal_and_other_files_alone(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Its descriptor is taken by a file of the script, or its disk is full."""
    failures: list[OSError] = []
    log = OutputLog(tmp_path / "output.log", failed=failures.append)
    log.keep(terminal.stream)
    with (tmp_path / target).open("wb") as file:
        if target == "own":
            os.dup2(file.fileno(), log._file)  # as after os.closerange(3, 1024)
        else:
            real = os.write
            monkeypatch.setattr(os, "write", lambda _log, data: real(file.fileno(), data))
        for _ in range(3):
            terminal.stream.write("shown\n")
            terminal.stream.flush()
    assert terminal.shows() == "shown\n" * 3
    assert [error.errno for error in failures] == [errno.EBADF if target == "own" else errno.ENOSPC]
    if target == "own":
        assert (tmp_path / target).read_bytes() == b""
        os.close(log._file)


def test_output_looks_as_it_did_on_the_terminal() -> None:
    assert terminal_text("  0%|  \r 50%|# \r100%|##\ndone\r\n") == "100%|##\ndone\n"
    assert terminal_text("\x1b[1;32mgreen\x1b[0m \x1b]0;title\x07text\x00") == "green text"


def ranks(rank: int, local_rank: int, world_size: int = 4, **more: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    return {key: str(number) for key, number in numbers.items()} | more


def test_ranks_of_one_parent_meet_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = find_place(tmp_path, "a", ranks(2, 0)), find_place(tmp_path, "a", ranks(3, 1))
    assert first.folder == second.folder
    assert [(place.number, place.rank) for place in (first, second)] == [(0, 2), (1, 3)]

    def apart(**more: str) -> Path:
        return find_place(tmp_path, "a", ranks(2, 0, **more)).folder

    folders = [first.folder, apart(TORCHELASTIC_RESTART_COUNT="1")]
    folders += [apart(MASTER_PORT="29500"), apart(MASTER_PORT="29501")]
    monkeypatch.setattr(socket, "gethostname", lambda: "another-node")
    folders += [apart(), find_place(tmp_path, "a", {}).folder, find_place(tmp_path, "a", {}).folder]
    for parent in (0, 2**22 + 1):  # outside the container, or gone
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        folders += [apart(), apart()]
    monkeypatch.undo()
    (first.folder / "rank0.sqlite").touch()  # an earlier run
    assert len({*folders, apart()}) == len(folders) + 1


def test_hosts_share_a_folder_only_if_the_run_is_named(tmp_path: Path) -> None:
    alone = find_place(tmp_path, "a", ranks(3, 1, LOCAL_WORLD_SIZE="2"))
    assert (alone.number, alone.folder_of, alone.sharing) == (1, "host", 2)
    named = {"LOCAL_WORLD_SIZE": "2", "STEPSCOPE_RUN_ID": "shared"}
    place = find_place(tmp_path, "a", ranks(3, 1, **named))
    assert (place.folder, place.number) == (tmp_path / "shared", 3)
    assert (place.folder_of, place.sharing) == ("job", 4)
    again = find_place(tmp_path, "a", ranks(3, 1, **named, TORCHELASTIC_RESTART_COUNT="1"))
    assert again.folder == tmp_path / "shared-restart1"
    (place.folder / "rank3.sqlite").touch()  # an earlier run of this name
    assert find_place(tmp_path, "a", ranks(3, 1, **named)).folder == alone.folder
    with pytest.raises(RankEnvironmentError, match="STEPSCOPE_RUN_ID"):
        find_place(tmp_path, "a", {"STEPSCOPE_RUN_ID": "../elsewhere"})


class Untold(Exception):
    """Fails at telling what it is."""

    def __str__(self) -> str:
        raise LookupError


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's own, by which it is known."""


FINISHED, FAILED, STOPPED = RunStatus.FINISHED, RunStatus.FAILED, RunStatus.STOPPED


@pytest.mark.parametrize(
    ("error", "status", "reason", "failure"),
    [
        (None, FINISHED, None, None),
        (SystemExit(2), FAILED, "The script ended with exit code 2.", None),
        (KeyboardInterrupt(), STOPPED, "Interrupted (Ctrl-C).", None),
        (OutOfMemoryError("Tried to allocate 2.00 GiB."), FAILED, "The GPU ran out", "oom"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), FAILED, "The host ran", "oom"),
        (Untold(), FAILED, "Untold: <Untold>", "error"),
        (
            ValueError("\x1b[31mIn Net:\n\n\tNo key.\n\tMore."),
            FAILED,
            "ValueError: In Net: No key.",
            "error",
        ),
    ],
)
def test_how_a_script_ended(
    error: BaseException | None, status: RunStatus, reason: str | None, failure: str | None
) -> None:
    found = outcome(error)
    assert (found.status, found.failure) == (status, failure)
    assert (found.reason or "").startswith(reason or "")
    assert failure == "oom" or found.reason == reason


def gpu(index: int, name: str = "NVIDIA H200") -> DeviceInfo:
    return info(index, name, uuid=f"GPU-{index}abc")


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-1 "}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, [0, 1, 2]),
    ],
)
def test_gpus_hidden_from_the_script_are_not_sampled(
    environ: dict[str, str], indices: list[int]
) -> None:
    gpus = [gpu(0), gpu(1), gpu(2)]
    assert [found.nvml_index for found in visible_gpus(gpus, environ)] == indices
    # CUDA's numbers of unequal GPUs are not guessed.
    unequal = [gpu(0, "small"), gpu(1, "large")]
    assert len(visible_gpus(unequal, {"CUDA_VISIBLE_DEVICES": "0"})) == 2


def test_options_after_the_script_are_the_scripts() -> None:
    options, words = _parse(["--name", "mine", "--runs=r", "train.py", "--name", "x", "-m"])
    assert (options.name, options.runs, options.module) == ("mine", Path("r"), False)
    assert words == ["train.py", "--name", "x", "-m"]
    assert _parse(["-m", "package.train", "--", "-h"])[1] == ["package.train", "--", "-h"]
    assert _parse(["--", "-odd.py"])[1] == ["-odd.py"]


@pytest.mark.parametrize("argv", [["--name", "x"], ["--nam", "x", "a.py"]])
def test_of_wrong_usage_nothing_runs(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)


TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SRUN, OPEN_MPI])
def test_every_launcher_tells_the_same(environ: dict[str, str]) -> None:
    found = launch(environ)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert found.local_world_size == 4


@pytest.mark.parametrize("inner", [TORCHRUN, OPEN_MPI])
def test_a_launcher_inside_of_srun_counts(inner: dict[str, str]) -> None:
    """mpirun has srun start one daemon on each node: its ranks inherit that one's numbers."""
    daemon = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert launch(SRUN | daemon | inner) == launch(inner)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script, and a shell of salloc, have a PROCID and no step of their own.
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "1"},
    ],
)
def test_a_process_that_nobody_launched_is_alone(environ: dict[str, str]) -> None:
    assert launch(environ) == LauncherEnv()


def test_a_script_may_set_some_variables_alone() -> None:
    found = launch(SRUN | {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "1"})
    assert (found.rank, found.world_size) == (5, 8)
    lightning = launch({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    assert (lightning.rank, lightning.local_rank, lightning.world_size) == (1, 1, 2)


@pytest.mark.parametrize(("text", "here"), [("4(x2)", 4), ("2(x2),1", None), ("", None)])
def test_tasks_of_each_node_as_slurm_writes_them(text: str, here: Any) -> None:
    assert launch(SRUN | {"SLURM_STEP_TASKS_PER_NODE": text}).local_world_size == here
