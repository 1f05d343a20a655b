"""Alerts about the device: memory that runs full, heat, a GPU that idles, and one that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stepscope.run import RunStatus, read_run, run_folders
from stepscope.store import EventRow
from tests.support.run_values import alerts

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, pathlib, time
import torch
net = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def steps(seconds, pause=0.02):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        optimizer.zero_grad()
        net(torch.randn(4, 8).cuda()).square().mean().backward()
        optimizer.step()
        time.sleep(pause)
"""
FULL = """
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


def watched(folder: Path, script: str, rules: str) -> tuple[Path, list[EventRow]]:
    """Run a script with these rules on a device of its own; return its run and its alerts."""
    (folder / "script.py").write_text(BEGIN + script)
    file, nvml = folder / "alerts.toml", folder / "nvml"
    nvml.touch()
    file.write_text(rules)
    file.chmod(0o600)
    own = {
        "CUDASIM_SHM": str(folder / "shared"),
        "CUDASIM_NVML": str(nvml),
        "STEPSCOPE_ALERTS": str(file),
        "STEPSCOPE_RUNS": str(folder / "runs"),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        [sys.executable, "-m", "stepscope.watch", "script.py"],
        cwd=folder,
        env={**os.environ, **own},
        timeout=110,
        check=True,
    )
    (run,) = run_folders(folder / "runs")
    assert read_run(run).status is RunStatus.FINISHED
    return run, alerts(run)


def test_full_memory_with_retries_is_told(tmp_path: Path) -> None:
    _, (raised, cleared) = watched(tmp_path, FULL, "[rules.memory_full]\nclear_s = 1\n")
    assert (raised.data["rule"], raised.data["state"]) == ("memory_full", "raised")
    assert raised.data["value"] > 95
    assert raised.data["uuid"].startswith("GPU-")
    assert "about to run out of memory" in raised.text
    assert (cleared.data["rule"], cleared.data["state"]) == ("memory_full", "cleared")
