"""The measured peak of a workload against that of a whole run, and of a script by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.host.child_process import ChildState
from trainer.config import RunConfig, Workload, defaults
from trainer.runners.child_process import MemoryProbeRun
from trainer.training.devices import list_devices

RUN = """
import json, sys
from pathlib import Path
import torch
from trainer.config import RunConfig
from trainer.runners.training_run import run
status = run(RunConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]))
assert status == "finished", (Path(sys.argv[2]) / "run.json").read_text()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
CASES: dict[str, dict[str, Any]] = {
    "gpt bf16": {"workload": "gpt", "width": 128, "batch_size": 8, "precision": "bf16"},
    "cuda graphs": {"workload": "digits_cnn", "batch_size": 256, "cuda_graphs": True},
    # The first updates are skipped, and so is the optimizer state.
    "cnn foreach": {
        "workload": "digits_cnn",
        "batch_size": 512,
        "optimizer_impl": "foreach",
        "precision": "fp16",
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 2,
    },
}


def on_gpu(settings: dict[str, Any]) -> RunConfig:
    device = next(one for one in list_devices() if one.cuda_index is not None)
    base = defaults(Workload(settings["workload"]), device.id).to_dict()
    return RunConfig.from_dict({**base, **settings})


def measured(config: RunConfig) -> dict[str, Any]:
    probe = MemoryProbeRun(config)
    assert probe.wait(300)
    output = probe.output()
    assert output.state is ChildState.FINISHED, output
    return output.answer


@pytest.mark.parametrize("name", CASES)
def test_the_measured_peak_is_that_of_a_run(name: str, tmp_path: Path) -> None:
    config = on_gpu(CASES[name])
    found = measured(config)
    assert found["fits"]
    assert found["steps"] >= 3
    settings = json.dumps({**config.to_dict(), "max_steps": 12})
    done = subprocess.run(
        [sys.executable, "-c", RUN, settings, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, reserved = json.loads(done.stdout.splitlines()[-1])
    assert found["measured_peak_bytes"] == pytest.approx(peak, rel=0.05)
    assert found["measured_reserved_bytes"] == pytest.approx(reserved, rel=0.15)
    assert found["parts"]["optimizer_state"] > 0
    assert found["free_bytes"] > 0


def test_a_batch_that_is_too_large_is_a_result() -> None:
    settings = {"workload": "gpt", "width": 4096, "context_length": 4096, "batch_size": 8192}
    found = measured(on_gpu(settings))
    assert found["fits"] is False
    assert "ran out of memory" in found["reason"]


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


def test_the_first_steps_of_a_script_have_the_peak_of_the_allocator(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["measure-memory", "--json", str(tmp_path / "train.py")]
    command = [sys.executable, "-m", "stepscope.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = 4 * 4 * (256 * 256 + 256)
    assert found["parts"]["trained_parameters"] == found["parts"]["gradients"] == weights
    # A counter for each of the eight parameters is on the host, or on the device if fused.
    assert found["parts"]["optimizer_state"] == pytest.approx(2 * weights, abs=8 * 512)
    assert found["measured_reserved_bytes"] >= found["measured_peak_bytes"]
    # Each of the eight layers keeps what it gave, of 8 MiB, besides the input and workspaces.
    assert 60 * 2**20 < found["parts"]["activations_and_the_rest"] < 160 * 2**20
    assert found["batch_factor"] > 1
