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
from trainer.training.run import run
status = run(RunConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]))
assert status == "finished", (Path(sys.argv[2]) / "run.json").read_text()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
CASES: dict[str, dict[str, Any]] = {
    "gpt bf16": {"workload": "gpt", "width": 128, "batch_size": 8, "precision": "bf16"},
    "resnet": {"workload": "resnet", "width": 16, "image_size": 64, "data_on_device": True},
    "cnn foreach": {
        "workload": "digits_cnn",
        "batch_size": 512,
        "fused": False,
        "foreach": True,
        "precision": "fp16",
        "clip_norm": 1.0,
        "accumulation": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_the_true_one(name: str, tmp_path: Path) -> None:
    device = next(one for one in list_devices() if one.cuda_index is not None)
    case = CASES[name]
    base = defaults(Workload(case["workload"]), device.id).to_dict()
    config = RunConfig.from_dict({**base, **case, "max_steps": 2, "epochs": 1}).to_dict()
    command = [sys.executable, "-m", "trainer.fit", "--config", "-", "--json"]
    command += ["--runs", str(tmp_path)]
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
