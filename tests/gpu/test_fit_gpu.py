"""The predicted peak against torch's own allocator: run the prediction, then the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import RunConfig, Workload, defaults
from trainer.devices import list_devices

WITHIN = 0.08
RUN = """
import json, sys
from pathlib import Path
import torch
from trainer.config import RunConfig
from trainer.training.train import run
status = run(RunConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]))
assert status == "finished", (Path(sys.argv[2]) / "run.json").read_text()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
CASES: dict[str, dict[str, Any]] = {
    "gpt bf16": {"workload": "gpt", "width": 128, "batch_size": 8, "precision": "bf16"},
    "resnet": {"workload": "resnet", "width": 16, "image_size": 64, "dataset_on_device": True},
    "cnn foreach": {
        "workload": "digits_cnn",
        "batch_size": 512,
        "optimizer_impl": "foreach",
        "precision": "fp16",
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_the_true_one(name: str, tmp_path: Path) -> None:
    device = next(one for one in list_devices() if one.cuda_index is not None)
    case = CASES[name]
    base = defaults(Workload(case["workload"]), device.id).to_dict()
    config = RunConfig.from_dict({**base, **case, "max_steps": 2, "epochs": 1}).to_dict()
    command = [sys.executable, "-m", "trainer.memory_estimate", "--config", "-", "--json"]
    before = torch.cuda.memory_allocated(0)
    found = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    predicted = json.loads(found.stdout)
    folder = tmp_path / "run"
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(config), str(folder)],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert ran.returncode == 0, ran.stderr
    allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
    assert predicted["predicted_peak_bytes"] == pytest.approx(allocated, rel=WITHIN)
    assert predicted["predicted_reserved_bytes"] == pytest.approx(reserved, rel=0.15)
    assert predicted["device"] == device.id
    assert predicted["free_bytes"] is not None
    assert 0 < predicted["free_bytes"] < predicted["total_bytes"]
    assert torch.cuda.memory_allocated(0) == before


SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(50):
    loss = model(torch.randn(8192, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_first_steps_of_a_script_say_what_the_allocator_gave(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["measure-memory", "--json", str(tmp_path / "train.py")]
    command = [sys.executable, "-m", "stepscope.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = 4 * 4 * (256 * 256 + 256)
    assert found["device"] == "cuda"
    assert found["parts"]["trained_parameters"] == found["parts"]["gradients"] == weights
    # A counter for each of the eight parameters is on the host, or on the device if fused.
    assert found["parts"]["optimizer_state"] == pytest.approx(2 * weights, abs=8 * 512)
    assert found["measured_reserved_bytes"] >= found["measured_peak_bytes"]
    # Each of the eight layers keeps what it gave, of 8 MiB.
    assert 60 * 2**20 < found["parts"]["activations_and_the_rest"] < 130 * 2**20
    assert found["batch_factor"] > 1
