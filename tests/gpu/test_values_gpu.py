"""Values on their way from the GPU: none is lost to the script's modes, or to a loop far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.recording import scalars
from stepscope.recording.recorder import Recorder
from stepscope.run import RunStatus
from tests.integration.test_training import metric

STEPS = 40
AHEAD = 800
LATE_CYCLES = 200_000_000  # some 100 ms at 2 GHz


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setattr(scalars, "_free", None)  # as in a process that has recorded nothing yet
    recorder = Recorder(tmp_path, name="values")
    yield recorder
    recorder.close(RunStatus.FINISHED)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [default_device, torch.inference_mode, FakeTensorMode])
def test_a_mode_of_the_script_loses_no_value(
    recorder: Recorder, mode: type[AbstractContextManager[None]]
) -> None:
    losses = torch.arange(STEPS, device="cuda", dtype=torch.float32).unbind()
    with mode():
        recorder.log_step({"train/loss": losses[0]})
    with mode() if mode is default_device else torch.enable_grad():
        for loss in losses[1:]:
            recorder.log_step({"train/loss": loss})
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == list(range(STEPS))


def test_a_loop_far_ahead_of_the_device_loses_no_value(recorder: Recorder) -> None:
    losses = torch.arange(AHEAD, device="cuda", dtype=torch.float32).unbind()
    recorder.log_step({"train/loss": losses[0]})  # the first makes the memory, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE_CYCLES)
    for loss in losses[1:]:
        recorder.log_step({"train/loss": loss})
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == list(range(AHEAD))
    assert recorder.dropped == 0
