"""`stepscope lab train.py`: real trials of a script, none of which may change the user's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.lab.folder import TRIALS_FILE, read_sweep
from tests.support.git_repository import commit, content
from tests.support.script_trials import folder_with, started_in, take
from tests.support.waiting import wait_until
from tests.support.watched_scripts import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_with("lab_digits.py", tmp_path, monkeypatch)


def test_a_trial_ends_after_its_steps_without_the_scripts_handlers(
    folder: Path, tmp_path: Path
) -> None:
    before = content(folder)
    answer = take(tmp_path, "--out", "{out}", **{"arguments": ["--batch-size", "16"]})
    metrics = answer["metrics"]
    assert metrics["steps"] == 40
    assert metrics["step_time"] * metrics["samples_per_sec"] == pytest.approx(16, rel=0.4)
    assert metrics["loss_finite"]
    assert answer["machine"]["rate"] == "samples/s"
    changed = take(tmp_path, **{"env:PAUSE": "0.001", "with:fused": True})
    assert [one["state"] for one in changed["settings"]] == ["in effect"]
    assert content(folder) == before  # neither a finally block nor a handler has written


@pytest.mark.parametrize(
    ("trouble", "stops", "word"), [("write", True, "notes.txt"), ("error", False, "RuntimeError")]
)
def test_what_no_trial_may_do_is_a_reason(
    folder: Path, tmp_path: Path, trouble: str, stops: bool, word: str
) -> None:
    answer = take(tmp_path, "--trouble", trouble)
    assert word in answer["reason"]
    assert bool(answer.get("stops")) is stops


def test_an_existing_checkpoint_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.pt"
    outside.write_bytes(b"mine")
    script = folder / "train.py"
    line = f"import torch; torch.save(1, {str(outside)!r})\n"
    script.write_text(f"{line}{script.read_text()}")
    answer = take(tmp_path, steps=20)
    assert (outside.read_bytes(), answer["stops"]) == (b"mine", True)
    assert str(outside) in answer["reason"]
    outside.unlink()
    assert take(tmp_path, steps=20)["metrics"]["steps"] == 20, "a new file outside of the folder"


def test_nothing_that_a_script_starts_or_creates_outlives_its_trial(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another session, and a temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    seconds = f"{600 + os.getpid() / 1e7:.7f}"
    answer = take(tmp_path, "--trouble", f"leave{seconds}")
    left = [
        one for one in psutil.process_iter(["cmdline"]) if seconds in (one.info["cmdline"] or ())
    ]
    for process in left:
        process.kill()
    files = [path for path in temporary.iterdir() if "torchinductor" not in path.name]
    assert (left, files) == ([], [])
    assert answer["metrics"]["steps"] == 40


def test_a_killed_sweep_leaves_the_folder_as_it_was_and_resumes(
    folder: Path, tmp_path: Path
) -> None:
    sweep = tmp_path / "sweep"
    words = ["--variant", "slow: --pause 0.01", "--steps", "30", "--warmup", "5"]
    words += ["--max-rounds", "1", "--folder", str(sweep)]
    command = [sys.executable, "-m", "stepscope.cli", "lab", *words, "train.py", "--out", "{out}"]
    before = content(folder)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (sweep / TRIALS_FILE).exists())
        wait_until(lambda: any(sweep.glob("trial-*/runs/*/run.json")))
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not started_in(sweep))
    assert content(folder) == before
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = read_sweep(sweep)
    assert (found["status"], found["variants"][0]["rounds"]) == ("finished", 1)
    base, [slow] = found["baseline"]["metrics"], found["variants"]
    assert slow["metrics"]["step_time"] > base["step_time"]
    assert found["plan"]["script"]["arguments"] == ["--out", "{out}"]
    assert content(folder) == before


def test_a_revision_runs_its_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first commit waits 20 ms in each of two modules, the working tree not at all."""
    top = (tmp_path / "mine").resolve()
    top.mkdir()
    script = (
        "import pathlib, time, torch, beside, on_path\n"
        "assert pathlib.Path('data/x.txt').read_text() == 'x'\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "while True:\n"
        "    time.sleep(beside.WAIT + on_path.WAIT)\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    names = ("beside.py", "lib/on_path.py")
    ignored = {".gitignore": "data\nruns\n"}
    first = commit(top, ignored | {"train.py": script} | dict.fromkeys(names, "WAIT = 0.02\n"))
    commit(top, dict.fromkeys(names, "WAIT = 0\n"))
    for name in ("data", "runs"):
        (top / name).mkdir()
    (top / "data/x.txt").write_text("x")
    monkeypatch.chdir(top)
    monkeypatch.setenv("STEPSCOPE_RUNS", str(top / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(top / "lib"), str(ROOT)]))

    def take_revision(**changes: str) -> dict[str, Any]:
        return take(top / "runs", steps=10, links=("data",), **changes)

    before = hashes(top)
    foreign = take_revision(rev=first)
    assert str(top / "lib/on_path.py") in foreign["reason"]
    assert not foreign.get("stops")
    relative = take_revision(rev=first, **{"env:PYTHONPATH": "lib"})
    assert relative["metrics"]["step_time"] >= 0.04
    assert hashes(top) == before


def hashes(top: Path) -> dict[str, str]:
    """Return the hashes of the files of a repository and of .git, without those of sweeps."""
    runs = str(top / "runs")
    return {path: value for path, value in content(top).items() if not path.startswith(runs)}
