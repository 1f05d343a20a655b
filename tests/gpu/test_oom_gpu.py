"""The OOM doctor on a GPU: every case provoked for real in a watched script, captured and named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope.memory.oom.classify import OomCause, diagnose
from stepscope.memory.oom.record import OomReport, read_report
from stepscope.run import run_folders
from tests.gpu.conftest import simulator_only
from tests.support.child_process import ROOT
from tests.support.run_values import events, run_json

pytestmark = pytest.mark.timeout(300)  # a CPU that is busy computes for a simulated GPU
HEAD = """
import sys, time, torch
from torch import nn
MIB = 2**20
torch.manual_seed(0)
free, total = torch.cuda.mem_get_info()

def take(size):
    return torch.empty(int(size), dtype=torch.uint8, device="cuda")

def training(width=256, batch=64, steps=12, pause=0.06):
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs = torch.randn(batch, width, device="cuda")
        net(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
    return net, optimizer
"""
TOO_LARGE = """
net = nn.Linear(1024, 1024).cuda()
inputs = torch.empty(int(0.6 * free / 4096), 1024, device="cuda")
net(inputs)
"""
PIECES = """
pairs = [(take(9 * MIB), take(9 * MIB)) for _ in range(int(0.95 * free) // (20 * MIB))]
kept = [first for first, _ in pairs]
del pairs
take(0.2 * total)
"""
OTHER_PROCESS = """
import subprocess
holder = subprocess.Popen(
    [sys.executable, "-c", '''
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
''', str(int(0.6 * free))],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
holder.stdout.readline()
try:
    training(steps=3)
    take(0.5 * free)
finally:
    holder.stdin.close()
    holder.wait()
"""
GROWTH = """
kept = []
net = nn.Linear(256, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    net(torch.randn(8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(take(0.02 * total))
    time.sleep(0.12)
"""
LONG_BATCH = """
net, optimizer = training(pause=0.2)  # so that a busy machine's sampler reads memory meanwhile
net(torch.empty(int(0.4 * free / 1024), 256, device="cuda"))
"""
BACKWARD = """
class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient):
        take(2 * free)

weights = torch.ones(4, device="cuda", requires_grad=True)
Hungry.apply(weights).sum().backward()
"""
CASES = {
    "too big": (TOO_LARGE, OomCause.TOO_LARGE, "forward"),
    "pieces": (PIECES, OomCause.FRAGMENTATION, None),
    "another process": (OTHER_PROCESS, OomCause.OTHER_PROCESS, None),
    "growth": (GROWTH, OomCause.GROWTH, None),
    "backward": (BACKWARD, OomCause.TOO_LARGE, "backward"),
}


def watched(folder: Path, script: str, *, init: bool = False) -> tuple[Path, str]:
    """Run a script under `stepscope watch`, or with `stepscope.init`; return its run's folder."""
    path = folder / "train.py"
    path.write_text(("import stepscope\nrec = stepscope.init()\n" if init else "") + script)
    done = subprocess.run(
        [sys.executable, *([] if init else ["-m", "stepscope.watch"]), str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "STEPSCOPE_RUNS": str(folder / "runs")},
    )
    (run,) = run_folders(folder / "runs")
    return run, done.stdout + done.stderr


def report_of(run: Path) -> OomReport:
    report = read_report(run)
    assert report is not None
    return report


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_named_in_a_watched_script(name: str, tmp_path: Path) -> None:
    script, cause, phase = CASES[name]
    run, said = watched(tmp_path, HEAD + script)
    assert "torch.OutOfMemoryError" in said  # it ends as it would bare
    report = report_of(run)
    finding = diagnose(report.last)
    assert (finding.cause, report.last.phase) == (cause, phase), finding.text
    assert report.ended
    assert report.seen == 1
    assert report.last.incomplete is None
    assert str(report.last.message).startswith("CUDA out of memory. Tried to allocate")
    assert any("train.py" in frame for frame in report.last.stack)
    reason = run_json(run)["reason"]
    assert f": {cause.lower()}. " in reason
    assert [event.kind for event in events(run) if "oom" in event.kind] == ["oom"]


def test_the_figures_are_those_of_the_allocator_before_it_unwound(tmp_path: Path) -> None:
    run, said = watched(tmp_path, HEAD + LONG_BATCH)
    last = report_of(run).last
    assert last.total == torch.cuda.get_device_properties(0).total_memory
    assert last.requested is not None
    assert last.requested > 0.3 * last.total
    assert last.allocated is not None
    assert last.allocated > 0.3 * last.total  # the batch, which is freed as the stack unwinds
    assert last.reserved is not None
    assert last.reserved >= last.allocated
    assert last.steps_done == 12
    assert last.peak_allocated is not None
    assert last.peak_allocated >= last.allocated
    assert "Tried to allocate" in said


CAUGHT = """
for size in (2, 3, 4):
    try:
        take(size * total)
    except torch.OutOfMemoryError:
        print("caught", flush=True)
net, optimizer = training(steps=6)
"""


@pytest.mark.parametrize("init", [False, True])
def test_a_caught_failure_is_an_event_and_fails_no_run(tmp_path: Path, init: bool) -> None:
    steps = "\nfor _ in range(3):\n    rec.step(loss=1.0)\n    time.sleep(0.15)\n" if init else ""
    run, said = watched(tmp_path, HEAD + CAUGHT + steps, init=init)
    assert said.count("caught\n") == 3
    assert run_json(run)["status"] == "finished"
    report = report_of(run)
    assert (report.seen, report.ended) == (3, False)
    assert report.last.requested == 4 * torch.cuda.get_device_properties(0).total_memory
    (event,) = [event for event in events(run) if event.kind == "oom_caught"]
    assert "failed and the script went on, 3 times: Too large to fit" in event.text
    assert event.data["seen"] == 3


WITHOUT_CUDA = """
import torch, cudasim
with cudasim.counted() as calls:
    weights = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(3):
        weights.sum().backward()
        optimizer.step()
        if "rec" in globals():
            rec.step(loss=1.0)
print("started:", torch.cuda.is_initialized(), dict(calls))
"""


@simulator_only
@pytest.mark.parametrize("init", [False, True])
def test_a_script_that_uses_no_cuda_gets_no_context(tmp_path: Path, init: bool) -> None:
    bare = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True, check=True
    )
    _, said = watched(tmp_path, WITHOUT_CUDA, init=init)
    assert bare.stdout.startswith("started: False")
    assert bare.stdout in said


RETRIED = """
for size in (0.6, 0.7, 0.5, 0.8):
    kept = take(size * free)
    del kept
print(torch.cuda.memory_stats()["num_alloc_retries"], "retries")
"""


def test_a_second_try_that_succeeds_is_no_failure(tmp_path: Path) -> None:
    run, said = watched(tmp_path, HEAD + RETRIED)
    assert " retries" in said
    assert "\n0 retries" not in said
    assert not (run / "oom.json").exists()
    assert not [event for event in events(run) if "oom" in event.kind]


IN_THREADS = """
import threading
def fail():
    for _ in range(20):
        try:
            take(2 * total)
        except torch.OutOfMemoryError:
            pass
threads = [threading.Thread(target=fail) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("joined")
"""


def test_failures_in_several_threads_neither_hang_nor_raise(tmp_path: Path) -> None:
    run, said = watched(tmp_path, HEAD + IN_THREADS)
    assert "joined" in said
    assert "cannot describe" not in said
    report = report_of(run)
    assert 1 < report.seen <= 80
    assert not report.ended
