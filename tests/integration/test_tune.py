"""`stepscope tune` on a script that waits for its data: the patch runs and has the effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.lab.folder import SWEEP_JSON, TRIALS_FILE
from tests.support.child_process import run_python
from tests.support.git_repository import content
from tests.support.watched_scripts import SCRIPTS

pytestmark = pytest.mark.timeout(300)  # 13 processes: 50 s on a quiet machine

TUNE = ["-m", "stepscope.cli", "tune", "--minutes", "10"]
SHORT = ["--steps", "20", "--warmup", "8", "--max-rounds", "3"]
CHECK = """
import runpy, sys
import torch.utils.data as data

original = data.DataLoader._get_iterator


def first(loader):
    iterator = original(loader)
    next(iterator)
    print(sum(worker.is_alive() for worker in iterator._workers))
    raise SystemExit


data.DataLoader._get_iterator = first
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the script; sweeps are beside it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    text = (SCRIPTS / "slow_dataset.py").read_text()
    seeded = "torch.manual_seed(0)  # else a loss may be higher by chance\n    model ="
    (mine / "train.py").write_text(text.replace("model =", seeded, 1))
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "runs"))
    return mine


def test_the_patch_of_a_slow_data_set_adds_workers(mine: Path, tmp_path: Path) -> None:
    before, sweep, faster = content(mine), tmp_path / "sweep", tmp_path / "faster.py"
    settings = ["--settings", "channels_last,pin_memory,num_workers=4"]
    command = [*TUNE, *SHORT, *settings, "--folder", str(sweep), "--apply", str(faster)]
    done = run_python(*command, "train.py", cwd=mine, timeout_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((sweep / SWEEP_JSON).read_text())
    assert found["best"]["variants"] == ["num_workers=4"]
    assert found["best"]["low"] > 0.3
    assert [variant["verdict"] for variant in found["variants"]] == [
        "impossible",
        "impossible",
        "faster",
    ]
    # The refused settings cost no trial: a first one, 3 rounds of 2, and 3 of the confirmation.
    assert len((sweep / TRIALS_FILE).read_text().splitlines()) == 13
    assert content(mine) == before
    patch = json.loads((sweep / "patch.json").read_text())
    assert "+    for batch in DataLoader(Slow(), batch_size=8, num_workers=4):\n" in patch["diff"]
    assert patch["by_hand"] == []
    again = [*command[: command.index("--apply")], "train.py"]  # resumes a sweep that has finished
    done = run_python(*again, cwd=mine)
    assert done.returncode == 0, done.stderr
    assert patch["diff"].splitlines()[-1] in done.stdout
    done = run_python("-c", CHECK, str(faster), cwd=mine)
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr
