"""Memory probes: the page's, of workloads, and `stepscope measure-memory`, of scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.cli.measure_memory import main as script_main
from stepscope.host.child_process import ChildOutput, ChildState
from tests.support.child_process import run_python
from tests.support.waiting import wait_until
from trainer.config import Optimizer, Workload, defaults
from trainer.runners import child_process
from trainer.runners.child_process import MemoryProbeRun
from trainer.workloads.build import build_task

# --- a built-in workload --------------------------------------------------------------------------


def measured(workload: Workload, *, search: bool = False, **changes: Any) -> ChildOutput:
    probe = MemoryProbeRun(replace(defaults(workload), **changes), search=search)
    assert probe.wait(300)
    return probe.output()


def test_three_steps_of_a_workload_are_measured_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sizes: dict[str, Any] = {"width": 1024, "batch_size": 1, "optimizer": Optimizer.SGD}
    model = build_task(replace(defaults(Workload.GPT), **sizes)).model
    weights = sum(weight.nbytes for weight in model.parameters())
    found = measured(Workload.GPT, **sizes).answer
    assert (found["fits"], found["steps"]) == (True, 3)
    assert found["parts"]["parameters_and_buffers"] == weights
    assert found["parts"]["optimizer_state"] == weights
    # Weights with momentum and gradient, besides the libraries that a first step loads.
    assert 3 * weights < found["measured_peak_bytes"] < 5 * weights + 400 * 2**20
    assert sum(found["parts"].values()) == found["measured_peak_bytes"]
    assert found["measured_reserved_bytes"] is None
    assert found["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_too_large_is_a_result() -> None:
    found = measured(Workload.GPT, width=4096, context_length=4096, batch_size=8192).answer
    assert found["fits"] is False
    assert "ran out of memory" in found["reason"]


def test_the_search_measures_up_to_an_epoch() -> None:
    found = measured(Workload.LINEAR, search=True, batch_size=400).answer
    assert [point["batch_size"] for point in found["points"]] == [400, 800]
    assert found["largest"] == 800  # the samples of an epoch
    assert found["recommended"] in (400, 800)
    assert min(point["samples_per_sec"] for point in found["points"]) > 0


@pytest.mark.parametrize("search", [False, True])
def test_a_workload_that_cannot_be_built_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: bool
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "labels.csv").write_text("path,label\nmissing.png,cat\nother.png,dog\n")
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path))
    output = measured(Workload.IMAGES, search=search, dataset="broken/labels.csv")
    assert output.state is ChildState.FAILED
    assert "labels.csv, line 2" in str(output.reason)


def test_the_processes_of_a_search_end_when_it_is_stopped() -> None:
    search = MemoryProbeRun(defaults(Workload.LINEAR), search=True)
    started: list[psutil.Process] = []

    def has_started() -> bool:
        children = psutil.Process().children(recursive=True)
        started[:] = [each for each in children if "trainer.memory_estimate" in each.cmdline()]
        return len(started) == 2

    wait_until(has_started, 60)
    search.stop()
    assert search.output().state is ChildState.STOPPED
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_a_probe_beyond_its_time_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "PROBE_LIMIT_S", 0.2)
    probe = MemoryProbeRun(defaults(Workload.LINEAR))
    assert probe.wait(30)
    output = probe.output()
    assert output.state is ChildState.FAILED
    assert output.reason


# --- a script -------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from torch import nn
print("arguments", sys.argv[1:])
batch, ending = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
steps = 0
try:
    for _ in range(50):
        if ending == "raise" and steps == 1:
            raise ValueError("no more")
        if ending == "exhaust" and steps == 1:
            torch.empty(2**50)
        loss = model(torch.randn(batch, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
finally:
    print("cleaned up", file=sys.stderr)
"""


def measure(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "stepscope.cli", "measure-memory", *words)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_measured_and_ended(script: str) -> None:
    done = measure("--steps", "4", "--json", script, "8192", "well", "--steps", "9")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["fits"], found["steps"]) == (True, 4)
    weights = 8 * 4 * (512 * 512 + 512)
    assert found["parts"]["trained_parameters"] == found["parts"]["gradients"] == weights
    assert found["parts"]["optimizer_state"] == 2 * weights + 16 * 4
    # Sixteen layers keep what they gave, of 16 MiB each; the process has loaded libraries too.
    assert 0.5 * 256 * 2**20 < found["parts"]["activations_and_the_rest"] < 3 * 256 * 2**20
    assert found["batch_factor"] is None, "only the allocator of a GPU gives one"
    assert str(["8192", "well", "--steps", "9"]) in done.stderr
    assert "cleaned up" not in done.stderr, "it may save or upload"


@pytest.mark.parametrize(
    ("ending", "fits"),
    [("raise", None), ("exhaust", False)],
)
def test_a_script_that_fails(script: str, ending: str, fits: bool | None) -> None:
    done = measure("--json", script, "4", ending)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["fits"]) == (1, fits)
    assert ("ValueError: no more" in done.stderr) == (ending == "raise")


def test_a_script_without_steps_gets_a_sentence(tmp_path: Path) -> None:
    for text, reason in (("print(1)", "did not import torch"), ("import torch", "optimizer")):
        path = tmp_path / "nothing.py"
        path.write_text(text)
        done = measure(str(path))
        assert done.returncode == 1
        assert reason in done.stdout


@pytest.mark.parametrize(
    "options", ["", "--steps 1 x.py", "--steps 1e9 x.py", "/nowhere.py", "--workload gpt"]
)
def test_wrong_usage_of_the_script_command(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the command adds the script's folder
    try:
        code: object = script_main(options.split())
    except SystemExit as error:  # of argparse
        code = error.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err
