"""The exported event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.child_process import run_python
from tests.support.run_folders import Row, append_rows, make_run, make_store

pytest.importorskip("tensorboard")

# In a process of its own: TensorBoard's imports warn, and warnings are errors here.
READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps({
    tag: [(one.wall_time, one.step, one.value) for one in found.Scalars(tag)]
    for tag in found.Tags()["scalars"]
}))
"""

Scalars = dict[str, list[list[float]]]  # tag -> [wall time, step, value]


def read(folder: Path) -> Scalars:
    """Return what TensorBoard finds in a folder."""
    found: Scalars = json.loads(run_python("-c", READ, str(folder)).stdout)
    return found


def export(run: Path, logdir: Path, *arguments: str) -> int:
    options = ["--format=tensorboard", f"--output={logdir}", *arguments]
    return run_python("-m", "stepscope.cli", "export", run.name, *options).returncode


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "runs"))
    return make_run(tmp_path / "runs", status="finished")


def test_tensorboard_reads_the_same_steps_times_and_values(run: Path, tmp_path: Path) -> None:
    losses: list[float] = np.random.default_rng(0).lognormal(size=3000).tolist()
    rows: list[Row] = [
        (1.7e9 + step / 8, step, {"train/loss": loss, "val/loss": loss / 3 if step % 7 else None})
        for step, loss in enumerate(losses)
    ]
    late = {3000: math.nan, 3001: None, 3002: math.inf}
    rows += [(1.7e9 + step / 8, step, {"train/loss": loss}) for step, loss in late.items()]
    append_rows(run, "steps", "", rows)
    assert export(run, tmp_path / "logs") == 0
    found = read(tmp_path / "logs" / run.name)
    assert found["train/loss"][:3000] == [
        [ts, step, float(np.float32(loss))]
        for (ts, step, _), loss in zip(rows, losses, strict=False)
    ]
    last = [(step, str(value)) for _, step, value in found["train/loss"][3000:]]
    assert last == [(3000, "nan"), (3002, "inf")]
    assert [step for _, step, _ in found["val/loss"]] == [n for n in range(3000) if n % 7]


def test_each_gpu_is_a_run_that_a_second_export_replaces(run: Path, tmp_path: Path) -> None:
    make_store(run)
    logs = tmp_path / "logs"
    for _ in range(2):
        assert export(run, logs) == export(run, logs, "--stream", "devices") == 0
    files = sorted(path.parent.relative_to(logs) for path in logs.rglob("events.out.tfevents.*"))
    place = Path(run.name)
    assert files == [place, place / "GPU-a", place / "GPU-b"]
    assert read(logs / place / "GPU-b") == {"gpu/util": [[10.0, 1, 50.0]]}
    assert not [path for path in logs.iterdir() if path.name.startswith(".")]


def test_an_untrusted_source_stays_in_the_log_directory(run: Path, tmp_path: Path) -> None:
    append_rows(run, "devices", "../../../out", [(1.0, 1, {"gpu/util": 1.0})])
    assert export(run, tmp_path / "a" / "logs", "--stream", "devices") == 0
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert file.is_relative_to(tmp_path / "a" / "logs" / run.name)
