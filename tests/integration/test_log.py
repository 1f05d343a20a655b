"""`stepscope.log`: the one line for values of the script's own, where something records or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import read_run, run_folders
from tests.support.run_values import metric

ROOT = Path(__file__).resolve().parents[2]

OPTIMIZED = """
import stepscope, torch
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(6):
    for tokens in (300, 200):
        stepscope.log(tokens=tokens, samples=4)
    (w.sum() * 2).backward()
    optimizer.step()
    if step == 4:
        stepscope.log({"val/accuracy": 90.0}, val_loss=0.5)
print("done")
"""
BY_INIT = """
import stepscope, torch
rec = stepscope.init(sample=False)
w = torch.nn.Parameter(torch.ones(3))
for step in range(6):
    w.sum().backward()  # under watch no step, as the script counts its own
    if step % 2:
        stepscope.log(tokens=500)
        rec.step(loss=1.0, samples=8)
    else:
        rec.step(loss=1.0, samples=8, tokens=500)
    if step == 4:
        stepscope.log({"val/accuracy": 90.0}, val_loss=0.5)
print("done")
"""


def run(tmp_path: Path, code: str, *how: str) -> list[Path]:
    """Run the code, bare or under watch, and return the folders of its runs."""
    path = tmp_path / "script.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", *how, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "STEPSCOPE_RUNS": str(tmp_path / "runs")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    return list(run_folders(tmp_path / "runs"))


def test_it_does_nothing_where_nothing_records(tmp_path: Path) -> None:
    code = "import stepscope, sys; stepscope.log(val_loss=1); stepscope.log({'x/y': 2}, tokens=3)"
    code += "\nassert 'numpy' not in sys.modules and 'stepscope.tracker' not in sys.modules"
    assert run(tmp_path, f"{code}\nprint('done')") == []


WATCH = ("-m", "stepscope.watch")


@pytest.mark.parametrize(
    ("code", "how"), [(OPTIMIZED, WATCH), (BY_INIT, ()), (BY_INIT, WATCH)], ids=["", "init", "both"]
)
def test_values_and_rates_of_the_script(tmp_path: Path, code: str, how: tuple[str, ...]) -> None:
    [folder] = run(tmp_path, code, *how)
    times = metric(folder, "perf/step_time")
    assert len(times) == 5
    assert np.allclose(metric(folder, "perf/tokens_per_sec"), 500 / times)
    assert np.allclose(metric(folder, "perf/samples_per_sec"), 8 / times)
    assert metric(folder, "val/loss").tolist() == [0.5]
    assert metric(folder, "val/accuracy").tolist() == [90.0]
    assert read_run(folder).run_json.get("custom") in (None, [])
    assert read_run(folder).run_json["step"] == 6
