"""Scripts record tags, group, note, arguments, git state, packages and final values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.run import RunStatus, read_metadata, read_run
from stepscope.run.info import CODE_DIFF, MAX_DIFF_BYTES, FinalMetric, GitState
from stepscope.session.code_state import CodeStateReader
from stepscope.store.recorder import Recorder
from tests.support.child_process import run_python
from tests.support.git_repository import commit, content, git

SCRIPT = """
import argparse, os
from pathlib import Path
import numpy
parser = argparse.ArgumentParser()
for name in ("lr", "data", "hf_token", "password", "max_tokens", "missing"):
    parser.add_argument("--" + name.replace("_", "-"))
parser.add_argument("--depth", type=int, default=3)
parser.set_defaults(data=Path("some"), made=object(), long="x" * 999)
parser.parse_args()
argparse.ArgumentParser().parse_args([])  # of a library
"""
WORDS = ["--lr", "0.1", "--hf-token", "S3CRET", "--password=S3CRET", "--max-tokens", "9"]


def run_script(folder: Path, *options: str, text: str = SCRIPT, program: str = "watch") -> Path:
    """Run a script in a subfolder of `folder`; return the run folder."""
    script = folder / "code" / "train.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    runs = folder / "runs"
    start = ["-m", "stepscope.watch", *options] if program == "watch" else []
    words = [*start, str(script), *(WORDS if program == "watch" else [])]
    done = run_python(*words, STEPSCOPE_RUNS=str(runs), HF_TOKEN="S3CRET")
    assert done.returncode == 0, done.stderr
    (run,) = runs.iterdir()
    return run


def test_a_watched_script_records_its_arguments_without_secrets(tmp_path: Path) -> None:
    options = ("--tag", "a", "--tag", "b", "--group", "sweep", "--note", "first try")
    folder = run_script(tmp_path, *options)
    found = read_metadata(read_run(folder))
    assert (found.tags, found.group, found.note) == (("a", "b"), "sweep", "first try")
    assert found.config == {"lr": "0.1", "data": "some", "max_tokens": "9", "depth": 3}
    for path in folder.rglob("*"):
        assert not path.is_file() or b"S3CRET" not in path.read_bytes(), path


def test_the_git_state_is_recorded_and_the_repository_is_unchanged(tmp_path: Path) -> None:
    config = {"login": {"api_key": "S3CRET"}, "lr": 0.1}
    text = f"import stepscope, numpy\nrun = stepscope.init('x', sample=False, config={config})\n"
    text += "run.step(loss=1.0)\n"
    files = {"code/train.py": "old = 1\n", "code/other.py": "x = 1\n", "code/HEAD": ""}
    made = commit(tmp_path, files)
    started = tmp_path / "started"
    hook = tmp_path / ".git" / "evil"
    hook.write_text(f"#!/bin/sh\ntouch {started}\n")
    hook.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.evil.textconv"):
        git(tmp_path, "config", name, str(hook))
    (tmp_path / ".gitattributes").write_text("*.py diff=evil\n")
    before = content(tmp_path / ".git")
    folder = run_script(tmp_path, text=text, program="init")
    found = read_metadata(read_run(folder))
    assert found.git == GitState(made, "main", dirty=True, diff=True)
    assert "-old = 1" in (folder / CODE_DIFF).read_text()
    assert found.config == {"login": {"api_key": "(hidden)"}, "lr": 0.1}
    assert found.packages is not None
    assert {"numpy", "stepscope"} <= set(found.packages)
    assert content(tmp_path / ".git") == before
    assert not started.exists()


@pytest.mark.parametrize("case", ["clean", "large", "off", "none"])
def test_no_diff_is_recorded_of_clean_or_large_changes_or_on_request(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    run.mkdir()
    if case != "none":
        large = "x = 1\n" * (MAX_DIFF_BYTES // 6 + 1)
        made = commit(code, {"large.py": large})
        if case == "large":
            (code / "large.py").write_text(large.replace("1", "2"))
    if case == "off":
        monkeypatch.setenv("STEPSCOPE_GIT", "0")
    described: list[dict[str, Any]] = []
    CodeStateReader(code, run, lambda **found: described.append(found["git"])).close(60.0)
    wanted = {"branch": "main", "dirty": case == "large", "diff": False}
    assert described == ([] if case in ("off", "none") else [{"commit": made, **wanted}])
    assert not list(run.iterdir())


def test_the_end_of_a_run_has_its_last_and_best_values(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    recorder = Recorder(tmp_path / "r", name="x")
    recorder.log(1, {"eval/f1": 0.5})  # older than the newest rows of the summary
    for step in range(1, 5001):
        loss = float("nan") if step == 5000 else 1.0 + 1 / step
        seconds = 0.1 + 0.2 * (step % 2)  # of 100 samples
        rate = {"perf/samples_per_sec": 100 / seconds, "perf/step_time": seconds}
        recorder.log(step, {"train/loss": loss, **rate})
    recorder.sample({"memory/peak_allocated": 5.0})
    for energy in (100.0, 350.0):
        recorder.sample({"gpu/energy": energy}, "GPU-1")
    recorder.describe(device="GPU-1")
    recorder.close(RunStatus.FINISHED)
    found = read_metadata(read_run(tmp_path / "r"))
    assert found.final == {
        "eval/f1": FinalMetric(0.5, None),  # which is better is not known
        "train/loss": FinalMetric(None, pytest.approx(1 + 1 / 4999)),
    }
    totals = dict(found.totals or {})
    assert totals.pop("samples_per_s") == pytest.approx(500, rel=1e-3)
    assert totals == {"steps": 5000, "peak_allocated": 5.0, "energy": 250.0}
