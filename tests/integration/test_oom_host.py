"""Host memory that is not enough: in a watched script, in a run of ours, and by the kernel."""

from __future__ import annotations

import json
import os
import time
from html import escape
from pathlib import Path

import pytest

from stepscope.compare.reports import run_report
from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.host import usage
from stepscope.memory.oom.classify import OomCause, diagnose_run
from stepscope.memory.oom.record import MemoryKind, read_report
from stepscope.run import RunStatus, read_run, run_folders
from tests.support.child_process import run_python
from tests.support.recorded_runs import write_run
from tests.support.run_values import run_json
from tests.support.training_runs import small
from trainer.config import Workload
from trainer.runners import training_run
from trainer.train import TrainStep

TRAINING = """
import torch
from torch import nn
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    net(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""
ENDINGS = {
    "python": ("raise MemoryError", None),
    "torch": ("def load():\n    return torch.empty(2**60, dtype=torch.uint8)\nload()", 2**60),
}


def watched(folder: Path, script: str) -> Path:
    (folder / "train.py").write_text(script)
    runs = str(folder / "runs")
    run_python("-m", "stepscope.watch", "train.py", cwd=folder, STEPSCOPE_RUNS=runs)
    (run,) = run_folders(folder / "runs")
    return run


@pytest.mark.parametrize("name", ENDINGS)
def test_a_watched_cpu_script_that_runs_out_says_it_is_the_hosts(name: str, tmp_path: Path) -> None:
    ending, asked = ENDINGS[name]
    run = watched(tmp_path, TRAINING + ending)
    report = read_report(run)
    assert report is not None
    last = report.last
    assert (last.memory, last.requested, report.ended) == (MemoryKind.HOST, asked, True)
    assert (last.step, report.seen) == (5, 1)
    assert last.host is not None
    assert last.host.total
    assert last.host.process
    assert any("train.py" in frame for frame in last.stack)
    if name == "torch":
        assert "load" in last.stack[0]
    found = diagnose_run(read_run(run))
    assert found is not None
    assert found.finding.cause is OomCause.HOST
    (finding,) = findings(read_recorded(read_run(run)))
    assert finding.kind == "out-of-memory"
    assert finding.text.startswith("Host memory")
    html = run_report([read_run(run)])
    for text in (
        escape(finding.text),
        ">Host, available<",
        "train.py",
        "traceback.txt",
    ):
        assert text in html
    assert str(tmp_path) not in html


def fail_with(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the first step of a training raise an error with this text."""

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(TrainStep, "__call__", fail)


def test_a_run_of_ours_on_the_cpu_is_told_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000 bytes."
    fail_with(monkeypatch, error)
    config = small(Workload.DIGITS_MLP, batch_size=64)
    assert training_run.run(config, tmp_path) is RunStatus.FAILED
    found = diagnose_run(read_run(tmp_path))
    assert found is not None
    assert found.report.last.requested == 640_000
    assert found.finding.cause is OomCause.HOST
    assert [(one.name, one.value) for one in found.finding.recommendations][0] == ("batch_size", 32)


KILLED_WORKER = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    for batch in DataLoader(Data(), batch_size=4, num_workers=1): pass
"""


def test_a_killed_worker_alone_is_no_lack_of_memory(tmp_path: Path) -> None:
    run = watched(tmp_path, KILLED_WORKER)
    ended = run_json(run)
    assert ended["status"] == "failed"
    # Killed before its first batch: while it sends one, its sockets may fail first, in many ways.
    assert "DataLoader worker" in ended["reason"], ended["reason"]
    assert read_report(run) is None


def cgroup(root: Path, kills: int) -> Path:
    folder = root / "job"
    folder.mkdir(exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\n")
    (folder / "memory.max").write_text("2147483648\n")
    (folder / "memory.current").write_text("2147000000\n")
    return folder


def test_a_run_that_the_kernel_killed_is_told_by_the_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "ROOT", tmp_path)
    folder = cgroup(tmp_path, 2)
    first = {"folder": str(folder), "count": 2}
    long_ago = time.time() - 100
    gone = {"status": "running", "heartbeat": long_ago, "pid": 2**22 + 1}
    run = write_run(tmp_path / "killed", gone | {"oom_kills": first, "step": 9})
    os.utime(run / "run.json", (long_ago, long_ago))
    assert read_run(run).status is RunStatus.CRASHED
    assert [one.kind for one in findings(read_recorded(read_run(run)))] == ["crashed"]
    cgroup(tmp_path, 3)
    (finding,) = findings(read_recorded(read_run(run)))
    assert finding.kind == "out-of-memory"
    report = diagnose_run(read_run(run))
    assert report is not None
    assert report.report.last.ts == pytest.approx(long_ago)  # at each look the same
    for heartbeat, host, kind in (
        (time.time() - 3600, {}, "crashed"),  # the counter may have counted anything since
        (long_ago, {}, "out-of-memory"),
        (long_ago, {"host": "elsewhere"}, "crashed"),  # another host's counter
    ):
        changed = run_json(run) | {"heartbeat": heartbeat} | host
        (run / "run.json").write_text(json.dumps(changed))
        os.utime(run / "run.json", (heartbeat, heartbeat))
        assert [one.kind for one in findings(read_recorded(read_run(run)))] == [kind]
