"""A trial of the lab on CUDA: the metrics and settings of a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stepscope.gpu.source import is_simulated
from stepscope.lab.script_plan import script_command
from stepscope.lab.trial_process import TrialProcess
from tests.conftest import Need
from trainer.config import Workload, defaults
from trainer.training.devices import cuda_reason, list_devices


@pytest.fixture
def gpu(need: Need) -> str:
    need(cuda_reason())
    return next(device.id for device in list_devices() if device.cuda_index is not None)


def take(folder: Path, gpu: str, **changes: Any) -> dict[str, Any]:
    job = {
        "config": defaults(Workload.DIGITS_MLP, gpu).to_dict(),
        "changes": changes,
        "seed": 1,
        "warmup": 10,
        "steps": 40,
    }
    return TrialProcess("trainer.lab.trial_run", folder).take(job, 110)


def test_a_trial_on_a_gpu_has_its_memory_times_and_clocks(tmp_path: Path, gpu: str) -> None:
    answer = take(tmp_path, gpu)
    metrics = answer["metrics"]
    for name in ("peak_allocated", "peak_reserved", "gpu_time", "h2d", "samples_per_sec"):
        assert metrics[name] > 0, name
    assert metrics["peak_allocated"] <= metrics["peak_reserved"]
    assert metrics["throttle"] is None or isinstance(metrics["throttle"], str)
    assert answer["machine"]["gpu"]


def test_a_script_on_a_simulated_gpu_is_not_measured_and_on_a_gpu_has_its_peak(
    tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "while True:\n"
        "    model(torch.ones(4, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".sweep").mkdir()
    script = asdict(script_command("train.py", [], is_module=False))
    job = {"script": script, "changes": {}, "seed": 1, "warmup": 3, "steps": 10}
    answer = TrialProcess("stepscope.lab.script_trial", tmp_path / ".sweep").take(job, 110)
    if is_simulated(gpu):
        assert "simulated" in answer["reason"]
        assert answer["stops"]
    else:
        assert answer["metrics"]["peak_allocated"] > 0
