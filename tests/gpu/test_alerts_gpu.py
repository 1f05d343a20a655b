"""Alerts about the device: memory that runs full."""

from __future__ import annotations

from pathlib import Path

from stepscope.run import RunStatus, read_run, run_folders
from tests.support.child_process import run_python
from tests.support.run_values import alerts

FULL = """
import time
import torch
net = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def steps(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        optimizer.zero_grad()
        net(torch.randn(4, 8).cuda()).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)

steps(2)
free, _ = torch.cuda.mem_get_info()
held = torch.empty(int(0.60 * free), dtype=torch.uint8, device="cuda")
cached = torch.empty(int(0.30 * free), dtype=torch.uint8, device="cuda")
del cached
steps(1)
more = torch.empty(int(0.38 * free), dtype=torch.uint8, device="cuda")  # only after a flush
steps(3)
del held, more
torch.cuda.empty_cache()
steps(6)
"""


def test_full_memory_with_retries_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FULL)
    rules = tmp_path / "alerts.toml"
    rules.write_text("[rules.memory_full]\nclear_s = 1\n")
    rules.chmod(0o600)
    own = {"CUDASIM_SHM": str(tmp_path / "shared"), "STEPSCOPE_ALERTS": str(rules)}
    own |= {"STEPSCOPE_RUNS": str(tmp_path / "runs")}
    done = run_python("-m", "stepscope.watch", "script.py", cwd=tmp_path, **own)
    assert done.returncode == 0, done.stderr
    (run,) = run_folders(tmp_path / "runs")
    assert read_run(run).status is RunStatus.FINISHED
    raised, cleared = alerts(run)
    assert (raised.data["rule"], raised.data["state"]) == ("memory_full", "raised")
    assert raised.data["value"] > 95
    assert raised.data["uuid"].startswith("GPU-")
    assert "about to run out of memory" in raised.text
    assert (cleared.data["rule"], cleared.data["state"]) == ("memory_full", "cleared")
