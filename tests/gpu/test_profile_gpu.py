"""Profiles of a training on CUDA: the command's life, and the NVTX ranges around parts of a step.

The simulator has no trace of kernels: there these tests see operators of the host alone.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from stepscope.distributed.rendezvous import find_place
from stepscope.profiling import phase_ranges
from stepscope.profiling.summary import OperatorKind, parse
from stepscope.run import RunKind, RunStatus
from stepscope.session.script_session import ScriptSession
from stepscope.store import EventRow, StoreReader
from tests.gpu.conftest import SIMULATED

PHASES = ("forward", "backward", "optimizer")


class Script:
    """A training of a small layer, recorded as `stepscope.init` does it."""

    def __init__(self, folder: Path) -> None:
        self.live = ScriptSession(find_place(folder, "test", {}), name="test", kind=RunKind.INIT)
        self.model = nn.Linear(64, 64, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.live.train_on(0)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with phase_ranges.span(phase_ranges.FORWARD):
                loss = self.model(torch.ones(8, 64, device="cuda")).sum()
            with phase_ranges.span(phase_ranges.BACKWARD):
                loss.backward()
            with phase_ranges.span(phase_ranges.OPTIMIZER):
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.live.recorder.log_step({"train/loss": 1.0})
            self.live.boundary()

    def profile(self, steps: int) -> None:
        self.live.recorder._offer(1, "profile", json.dumps({"steps": steps}))
        self.train(steps + 3)

    def close(self) -> EventRow:
        self.live.close(RunStatus.FINISHED)
        with StoreReader(self.live.recorder.folder) as reader:
            [event] = [event for event in reader.events() if event.kind == "profile"]
        return event


def test_a_profile_on_cuda(tmp_path: Path) -> None:
    script = Script(tmp_path)
    try:
        script.profile(3)
        assert torch.cuda.nvtx.range_pop() < 0  # type: ignore[no-untyped-call] # none is open
    finally:
        event = script.close()
    assert event.data["ok"], event.text
    folder = script.live.recorder.folder
    assert event.data["last"] - event.data["first"] == 2
    events = json.loads(gzip.decompress((folder / event.data["path"]).read_bytes()))["traceEvents"]
    kinds = Counter(event.get("cat") for event in events)
    summary = parse((folder / event.data["summary"]).read_bytes())
    assert summary.cuda is not SIMULATED  # the simulator records no kernels
    operators = {row.name: row for row in summary.operators if row.kind != OperatorKind.KERNEL}
    linear = operators["aten::addmm"]
    assert linear.calls == 3
    assert all(operators[phase].calls == 3 for phase in PHASES)
    if not SIMULATED:
        assert kinds["kernel"] > 0
        assert linear.cuda_self_us > 0
        assert any(row.kind is OperatorKind.KERNEL for row in summary.operators)
        assert all(operators[phase].cuda_total_us > 0 for phase in PHASES)


@pytest.mark.parametrize("nsight", [False, True])
def test_nvtx_ranges_are_emitted_while_profiled_or_under_nsight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nsight: bool
) -> None:
    """Kernels are left to Nsight."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    if nsight:
        monkeypatch.setenv(phase_ranges.NSIGHT, "1")
    phase_ranges.end()
    script = Script(tmp_path)
    try:
        script.train(2)
        script.profile(2)
        script.train(2)
    finally:
        event = script.close()
        monkeypatch.delenv(phase_ranges.NSIGHT, raising=False)
        phase_ranges.end()
    ranges = 2 + 5 + 2 if nsight else 2
    assert seen == [word for phase in PHASES for word in (phase, "end")] * ranges
    if nsight:
        summary = (script.live.recorder.folder / event.data["summary"]).read_bytes()
        assert not parse(summary).cuda
