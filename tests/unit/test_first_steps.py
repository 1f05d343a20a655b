"""What a script's first steps say about its batch: the factor by hand, and when there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from stepscope.host.usage import CgroupMemory
from stepscope.memory.batch_headroom import StepMemory, TrainingDevice, report
from stepscope.watch import memory_probe
from stepscope.watch.memory_probe import StepMemoryProbe
from tests.support.python_programs import run_python
from trainer.config_validation import TrainDevice
from trainer.memory_estimate import estimate

GIB = 2**30
GPU = TrainingDevice("cuda", "a GPU", 9 * GIB)
STEP = StepMemory(
    peak=3 * GIB,
    reserved=3 * GIB,
    reserved_now=3 * GIB,
    kept=GIB,
    parameters=GIB // 4,
    gradients=GIB // 4,
    state=GIB // 2,
    device=GPU,
)
FIRST = replace(STEP, peak=20 * GIB, state=0)


def test_the_rest_of_the_peak_grows_with_the_batch() -> None:
    found = report([FIRST, STEP, STEP], "none")
    # 12 GiB in all, of which 10 % stay free and 1 GiB is fixed: 9.8 GiB for what takes 2 now.
    assert found.factor == pytest.approx(4.9)
    assert found.room == 12 * GIB
    assert "about 4.9× as" in found.text
    assert found.parts["activations_and_the_rest"] == 2 * GIB
    assert found.parts["others_kept"] == 0
    assert json.loads(json.dumps(found.to_json()))["batch_factor"] == pytest.approx(4.9)


HOST = TrainingDevice("cpu", "the host's memory", 9 * GIB)
LOOSE = replace(STEP, reserved=6 * GIB, reserved_now=6 * GIB, device=replace(GPU, free=6 * GIB))
EMPTIED = replace(STEP, reserved_now=GIB, device=replace(GPU, free=11 * GIB))


@pytest.mark.parametrize(
    ("step", "room", "factor"),
    [
        (LOOSE, 12, (12 * 0.9 / 2 - 1) / 2),  # what the allocator keeps counts in proportion
        (EMPTIED, 12, 4.9),  # what it gave back is free and counts once
        (replace(STEP, reserved=None, reserved_now=None, device=HOST), 10, (10 * 0.9 - 1) / 2),
        (replace(STEP, kept=2 * GIB), 12, 4.9),  # what stays besides the weights grows
    ],
)
def test_the_factor_of_other_steps(step: StepMemory, room: int, factor: float) -> None:
    found = report([replace(step, peak=20 * GIB), step, step], "none")
    assert found.room == room * GIB
    assert found.factor == pytest.approx(factor)
    assert found.parts["others_kept"] == step.kept - GIB


def test_a_batch_that_is_too_large_already_should_shrink() -> None:
    tight = replace(STEP, device=replace(GPU, free=0))
    found = report([FIRST, tight, tight], "none")
    assert found.factor == pytest.approx((3 * 0.9 - 1) / 2)
    assert "less than 10%" in found.text
    none_fits = replace(STEP, kept=STEP.peak - GIB // 4, device=replace(GPU, free=0))
    assert report([none_fits] * 3, "none").factor == 0.0


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([STEP], "No advice: only one step was measured, and the first is not representative."),
        ([STEP, STEP, replace(STEP, optimizer=1)], "No advice: several optimizers alternate,"),
        ([FIRST, replace(STEP, state=GIB // 4), STEP], "state still grew"),
        ([STEP, STEP, replace(STEP, waiting=1)], "No advice: another optimizer has not stepped"),
        ([STEP, STEP, replace(STEP, device=replace(GPU, index=1))], "several devices"),
        ([STEP, replace(STEP, kept=STEP.peak - 1000)], "too little to measure"),
        ([STEP, STEP, replace(STEP, peak=5 * GIB)], "as with batches of varying length."),
        ([STEP, STEP, replace(STEP, peak=5 * GIB, kept=3 * GIB)], "as with batches of varying"),
    ],
)
def test_where_it_cannot_be_told_there_is_no_factor(steps: list[StepMemory], said: str) -> None:
    found = report(steps, "none")
    assert found.factor is None
    assert said in found.text
    found = report([], "No step was seen.")
    assert (found.text, found.factor, found.peak) == ("No step was seen.", None, None)


def test_the_hosts_memory_ends_at_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = CgroupMemory(limit=GIB, used=GIB - 4096)
    monkeypatch.setattr(memory_probe, "container", lambda: held)
    monkeypatch.setattr(estimate, "container", lambda: held)
    assert StepMemoryProbe(3, lambda: None)._device(None).free == 4096
    host = estimate.free_memory(TrainDevice(id="cpu", name="CPU", memory_total=GIB))
    assert (host.bytes, host.total) == (4096, GIB)


BLOCKS = """
import ctypes, psutil
from stepscope.watch.memory_probe import StepMemoryProbe

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
StepMemoryProbe(2, lambda: None).start()

def block(kibibytes):
    made = libc.malloc(kibibytes * 1024)
    ctypes.memset(made, 1, kibibytes * 1024)
    return made

libc.free(block(24 * 1024))  # glibc would cache smaller blocks from now on
large, above = block(20 * 1024), block(100)
before = psutil.Process().memory_info().rss
libc.free(large)
print(before - psutil.Process().memory_info().rss)
"""


def test_freed_memory_of_a_step_is_not_part_of_the_next_peak() -> None:
    done = run_python("-c", BLOCKS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 19 * 2**20
