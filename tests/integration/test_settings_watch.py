"""`stepscope watch --with` around whole scripts."""

from __future__ import annotations

from pathlib import Path

from stepscope.run import read_run, run_folders
from tests.support.watched_scripts import AS_MODULE, run

HOSTILE = """
import os, pickle, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.argv[1:] = ["changed"]
os.chdir("/")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, shuffle=True)
if (pid := os.fork()) == 0:
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
    os._exit(0)
os.waitpid(pid, 0)
for _ in range(2):
    for (batch,) in pickle.loads(pickle.dumps(loader)):
        pass
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
print(loss.item())
sys.exit(3)
"""


def test_what_happened_is_printed_and_recorded(tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    script.write_text(HOSTILE)
    watch = [*AS_MODULE, "--with", "tf32 num_workers=2", "--with", "threads=3 fused", str(script)]
    seen = run(watch, runs, PYTHONWARNINGS="error")
    assert seen.returncode == 3, seen.stderr
    assert float(seen.stdout) > 0
    [folder] = run_folders(runs)
    entries = {entry["name"]: entry for entry in read_run(folder).run_json["settings"]}
    states = {name: entry["state"] for name, entry in entries.items()}
    effective = dict.fromkeys(["fused", "num_workers", "threads"], "in effect")
    assert states == {"tf32": "refused", **effective}
    assert entries["fused"]["places"] == [{"file": str(script), "line": 11}]
    assert entries["num_workers"]["places"] == [{"file": str(script), "line": 12}]
    assert seen.stderr.decode().count("stepscope: setting ") == len(entries)
    for entry in entries.values():
        assert entry["text"] in seen.stderr.decode()
