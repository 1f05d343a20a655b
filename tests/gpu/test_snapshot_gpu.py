"""The memory snapshot of a script on a real GPU: one step's allocations, and no history after."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.session.script_session import ScriptSession
from stepscope.store import StoreReader


def test_a_snapshot_holds_one_steps_allocations(tmp_path: Path) -> None:
    live = ScriptSession(find_place(tmp_path, "test", {}), name="test", kind=RunKind.WATCH)
    try:
        weights = torch.zeros(1024, 1024, device="cuda")
        live.train_on(weights.device.index)
        live.recorder.log_step({"train/loss": 1.0})
        live.recorder._offer(1, "memory_snapshot", "{}")
        assert live.boundary() > 0
        assert torch._C._cuda_isHistoryEnabled()
        del weights
        kept = torch.ones(512, 1024, device="cuda")
        live.recorder.log_step({"train/loss": 1.0})
        assert live.boundary() > 0
        assert not torch._C._cuda_isHistoryEnabled()
    finally:
        live.close(RunStatus.FINISHED)
    with StoreReader(live.recorder.folder) as reader:
        [event] = [event for event in reader.events() if event.kind == "memory_snapshot"]
    path = live.recorder.folder / event.data["path"]
    assert (event.data["ok"], path.stat().st_size) == (True, event.data["bytes"])
    traces = pickle.loads(path.read_bytes())["device_traces"]
    actions = [(entry["action"], entry["size"]) for trace in traces for entry in trace]
    assert ("alloc", kept.nbytes) in actions
    assert ("free_completed", 4 * 1024 * 1024) in actions
    run_json = read_run(live.recorder.folder).run_json
    assert "memory_snapshot" in run_json["commands"]
    assert run_json["device"] in [gpu["uuid"] for gpu in run_json["devices"]]
