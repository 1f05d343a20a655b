"""A device that falls off the bus while a script trains: its run ends as the bare script does."""

from __future__ import annotations

import subprocess
from pathlib import Path

from stepscope.run import RunStatus, read_run, run_folders
from tests.gpu.conftest import simulator_only
from tests.support.child_process import run_python
from tests.support.run_values import events, metric

GOOD_STEPS = 30

SCRIPT = f"""
import time
import cudasim, torch
torch.manual_seed(0)
net = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item(), flush=True)
        time.sleep(0.02)

steps({GOOD_STEPS})
cudasim.fault("launch:3:lost")
try:
    steps(10)
finally:
    time.sleep(1)  # so that the sampler comes by
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a device of its own, which no other test sees lost."""
    own = {"CUDASIM_SHM": str(folder / "shared"), "STEPSCOPE_RUNS": str(folder / "runs")}
    return run_python(*command, cwd=folder, **own)


@simulator_only
def test_a_device_lost_mid_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    bare = run(str(script), folder=tmp_path)
    (tmp_path / "shared").unlink()
    watched = run("-m", "stepscope.watch", str(script), folder=tmp_path)
    assert bare.returncode != 0
    assert (watched.returncode, watched.stdout) == (bare.returncode, bare.stdout)
    (folder,) = run_folders(tmp_path / "runs")
    ended = read_run(folder)
    assert ended.status is RunStatus.FAILED
    assert "CUDA" in str(ended.reason)
    told = [float(line) for line in bare.stdout.split()]
    recorded = metric(folder, "train/loss").tolist()
    assert recorded == told[: len(recorded)]
    assert len(recorded) >= len(told) - 1 >= GOOD_STEPS - 1, "only the last may be on its way"
    assert [event.text for event in events(folder) if "GPU is lost" in event.text]
