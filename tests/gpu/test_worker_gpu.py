"""The child process of a run whose GPU is lost: it ends as any other, with its reason told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.conftest import simulator_only
from tests.support.run_values import run_json
from tests.support.training_runs import start_worker
from trainer.config import Workload, defaults
from trainer.training.devices import list_devices

ASSERTED = "launch:600:assert"
"""Some steps into the training: the device is unusable from there on."""


@simulator_only
@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_a_lost_gpu_it_ends_without_an_abort(num_workers: int, tmp_path: Path) -> None:
    """The interpreter's end empties the modules: what they alone hold is freed there."""
    gpu = next(device for device in list_devices() if device.cuda_index is not None)
    usual = defaults(Workload.LINEAR, gpu.id)
    config = replace(usual, batch_size=8, epochs=50, num_workers=num_workers)
    assert config.pin_memory, "it is the page-locked buffers that must not be freed"
    own = str(tmp_path / "shared")  # a device of its own, which no other test sees lost
    with start_worker(config, tmp_path, CUDASIM_SHM=own, CUDASIM_FAULT=ASSERTED) as child:
        code = child.wait(100)
    ended = run_json(tmp_path)
    reason = str(ended["reason"])
    assert reason.startswith("The GPU failed: CUDA error: device-side assert"), reason
    assert code == 0
