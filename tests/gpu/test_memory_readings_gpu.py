"""The allocator's counters of a CUDA run: read without holding up a thread, counted from its start.

While torch gives back its cache for one more allocation it holds the allocator's lock and waits for
the device; a thread that reads the counters then waits as well, and holds the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind, RunStatus
from stepscope.session.script_session import ScriptSession

SHORT_STEPS = 50
CYCLES_A_SECOND = 2_000_000_000
"""For a device that is kept waiting; a real one is a little slower or faster."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ScriptSession]:
    live = ScriptSession(find_place(tmp_path, "memory", {}), name="memory", kind=RunKind.WATCH)
    yield live
    live.close(RunStatus.FINISHED)
    torch.cuda.empty_cache()


class Beat:
    """A thread that does next to nothing, and how long it was kept from it."""

    def __enter__(self) -> Beat:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(0.002):
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


def fill(share: float) -> torch.Tensor:
    """Take this share of the device's memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    return torch.empty(int(share * total), dtype=torch.uint8, device="cuda")


def retry_allocation() -> float:
    """Ask for more than is free while the cache is in use on the device; return the seconds."""
    cached = fill(0.5)
    torch.cuda._sleep(int(0.8 * CYCLES_A_SECOND))
    del cached
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    began = time.perf_counter()
    fill(0.6)
    took_s = time.perf_counter() - began
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
    return took_s


def train_short_steps(live: ScriptSession, x: torch.Tensor) -> None:
    live.train_on(0)
    for step in range(SHORT_STEPS):
        x.add_(1)
        torch.cuda.synchronize()
        live.recorder.log(step, {"train/loss": 1.0})
        live.boundary()
        time.sleep(0.01)


@pytest.mark.alone
@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_no_thread_waits_while_torch_waits_for_memory(live: ScriptSession, step_s: float) -> None:
    train_short_steps(live, fill(0.01))
    time.sleep(step_s)  # the step under way
    with Beat() as beat:
        stalled_s = retry_allocation()
    assert stalled_s > 0.3, "it did not wait for the device"
    assert beat.longest_s < stalled_s / 2
