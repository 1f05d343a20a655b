"""`stepscope lab --nproc-per-node 2`: real trials of a DDP script over gloo on the CPU."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.lab.folder import read_sweep
from tests.support.git_repository import content
from tests.support.script_trials import folder_with, started_in, take
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_with("lab_ranks.py", tmp_path, monkeypatch)


def command(sweep: Path, *options: str) -> list[str]:
    words = [*options, "--nproc-per-node", "2", "--steps", "20", "--warmup", "5"]
    words += ["--max-rounds", "2", "--folder", str(sweep), "train.py", "--pause", "0.01"]
    return [sys.executable, "-m", "stepscope.cli", "lab", "--variant", "slow: --pause 0.2", *words]


def test_a_slow_rank_is_found_and_the_folder_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    words = command(tmp_path / "sweep", "--gate", "step_time:+3%")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    found = read_sweep(tmp_path / "sweep")
    assert found["plan"]["script"]["nproc_per_node"] == 2
    base, [slow] = found["baseline"], found["variants"]
    assert slow["metrics"]["step_time"] >= 0.2 > base["metrics"]["step_time"]
    per_step = slow["metrics"]["step_time"] * slow["metrics"]["samples_per_sec"]
    assert per_step == pytest.approx(64, rel=0.05)
    assert content(folder) == before  # no signal handler has written


@pytest.mark.parametrize(
    ("trouble", "texts"),
    [
        ("error", ["Rank 1: RuntimeError"]),
        ("exit", ["Rank 1 ", "no more memory"]),
        ("alone", ["init_process_group"]),
    ],
)
def test_a_rank_that_fails_is_named(
    folder: Path, tmp_path: Path, trouble: str, texts: list[str]
) -> None:
    reason = take(tmp_path, "--trouble", trouble, ranks=2)["reason"]
    assert [text for text in texts if text not in reason] == []


def test_a_killed_sweep_leaves_no_rank(folder: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = command(sweep)
    words[words.index("20")] = "100000"
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: any(sweep.glob("trial-*/runs/*/rank1.json")), 200)
        assert len(started_in(sweep)) >= 4, "the trial, torchrun and two ranks"
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not started_in(sweep))
