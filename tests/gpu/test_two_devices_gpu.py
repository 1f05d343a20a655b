"""A machine with two GPUs of which a script uses the second: that one is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.run import RunStatus, read_run, run_folders
from tests.conftest import Need
from tests.gpu.conftest import SIMULATED
from tests.support.child_process import ROOT
from tests.support.run_values import metric

MIB = 2**20
BESIDE_MIB, USED_MIB = 300, 100

SCRIPT = f"""
import json, sys, time
import torch
beside = torch.zeros({BESIDE_MIB} << 20, dtype=torch.uint8, device="cuda:0")
used = torch.zeros({USED_MIB} << 20, dtype=torch.uint8, device="cuda:1")
torch.manual_seed(0)
net = torch.nn.Linear(8, 1).to("cuda:1")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = net(torch.randn(4, 8).to("cuda:1")).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    time.sleep(0.05)  # so that the sampler comes by
properties = torch.cuda.get_device_properties(1)
print(json.dumps(dict(
    losses=[float(loss) for loss in losses], uuid=str(properties.uuid),
    allocated=torch.cuda.memory_allocated(1), current=torch.cuda.current_device(),
)))
"""

TRAINER = """
import json, sys
from pathlib import Path
from dataclasses import replace
from trainer.runners.training_run import run as train
from trainer.config import Workload, defaults
from trainer.training.devices import list_devices
[first, second] = [device for device in list_devices() if device.cuda_index is not None]
config = replace(defaults(Workload.DIGITS_MLP, second.id), epochs=2)
folder = Path(sys.argv[1])
folder.mkdir()
print(train(config, folder))
import torch
print(json.dumps([torch.cuda.max_memory_allocated(i) for i in range(2)]))
print(json.dumps([second.id, second.cuda_index]))
"""


@pytest.fixture(autouse=True)
def _two(need: Need) -> None:
    need(None if SIMULATED or torch.cuda.device_count() > 1 else "only one GPU here")


def run(*command: str, runs: Path) -> list[str]:
    """Run Python where two devices are seen, also on the simulator; return the lines said."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=runs.parent,
        env={
            **os.environ,
            "CUDASIM_DEVICES": "2",
            "PYTHONPATH": str(ROOT),
            "STEPSCOPE_RUNS": str(runs),
        },
        text=True,
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_watched_script_on_the_second_device(tmp_path: Path) -> None:
    script, runs = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    said: dict[str, Any] = json.loads(run("-m", "stepscope.watch", str(script), runs=runs)[-1])
    (folder,) = run_folders(runs)
    run_json = read_run(folder).run_json
    assert run_json["device"] == f"GPU-{said['uuid']}"
    assert len(run_json["devices"]) == 2
    assert metric(folder, "train/loss").tolist() == pytest.approx(said["losses"], rel=1e-6)
    allocated = metric(folder, "memory/allocated", "samples")
    assert USED_MIB * MIB <= allocated.max() < BESIDE_MIB * MIB
    assert said["current"] == 0, "the script's own device stays"


def test_the_trainer_on_the_second_device(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, peaks, device = run("-c", TRAINER, str(folder), runs=tmp_path / "runs")
    assert status == RunStatus.FINISHED
    first, second = json.loads(peaks)
    uuid, index = json.loads(device)
    assert (index, first) == (1, 0), "nothing is allocated on the other device"
    assert read_run(folder).run_json["config"]["device"] == uuid
    assert 0 < metric(folder, "memory/allocated", "samples").max() <= second
