"""Processes that end where CUDA no longer answers: forked children, and after a lasting error.

Page-locked memory and CUDA events freed there end the process by `std::terminate`; a script has to
end under `watch` and `init` as it does bare.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stepscope.run import run_folders
from tests.gpu.conftest import simulator_only
from tests.support.child_process import run_python
from tests.support.run_values import metric

Ended = subprocess.CompletedProcess[str]
Bare = Callable[[str], Ended]

TRAINING = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rec = None
if os.environ.get("SHOWN_BY") == "init":
    import stepscope
    rec = stepscope.init("endings")

torch.manual_seed(0)
net = nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))

def train(loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs.to("cuda")), targets.to("cuda"))
        loss.backward()
        optimizer.step()
        if rec is not None:
            rec.step(loss=loss.detach())
"""
WORKERS = """
loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
for epoch in range(3):
    train(loader)
print("trained", flush=True)
"""
FORK = """
train(DataLoader(data, batch_size=8))
child = os.fork()
if child == 0:
    sys.exit(5)  # the interpreter of the child takes itself apart
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
DEAD = """
import cudasim
train(DataLoader(data, batch_size=8))
cudasim.fault("sticky:illegal")
train(DataLoader(data, batch_size=8))
"""


def run(folder: Path, ending: str, shown_by: str) -> Ended:
    """Run the script bare, or under `watch` or `init`."""
    script = folder / "script.py"
    script.write_text(TRAINING + ending)
    how = ["-m", "stepscope.watch"] if shown_by == "watch" else []
    runs = str(folder / "runs")
    return run_python(
        *how, str(script), cwd=folder, timeout_s=200, STEPSCOPE_RUNS=runs, SHOWN_BY=shown_by
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Return how a script ends that nobody shows; each runs once."""
    return cache(lambda ending: run(tmp_path_factory.mktemp("bare"), ending, "bare"))


def same_as_bare(bare: Ended, folder: Path, ending: str, shown_by: str) -> str:
    """Check exit code and output against the bare script's; return stderr."""
    shown = run(folder, ending, shown_by)
    assert shown.returncode == bare.returncode, shown.stderr[-3000:]
    assert shown.stdout == bare.stdout
    return shown.stderr


@pytest.mark.parametrize("shown_by", ["watch", "init"])
def test_forked_workers_of_every_pass_end_well(bare: Bare, tmp_path: Path, shown_by: str) -> None:
    same_as_bare(bare(WORKERS), tmp_path, WORKERS, shown_by)
    (folder,) = run_folders(tmp_path / "runs")
    assert len(metric(folder, "train/loss")) == 3 * 8


@pytest.mark.parametrize("shown_by", ["watch", "init"])
def test_a_forked_child_may_end_its_interpreter(bare: Bare, tmp_path: Path, shown_by: str) -> None:
    same_as_bare(bare(FORK), tmp_path, FORK, shown_by)


@simulator_only
@pytest.mark.parametrize("shown_by", ["watch", "init"])
def test_a_dead_context_ends_as_it_does_bare(bare: Bare, tmp_path: Path, shown_by: str) -> None:
    said = same_as_bare(bare(DEAD), tmp_path, DEAD, shown_by)
    own = [line for line in said.splitlines() if line.startswith("stepscope")]
    assert not [line for line in own if "CUDA_LAUNCH_BLOCKING" in line]
