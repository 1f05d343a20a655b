"""The device seam: everything that differs between a CPU and a CUDA device, in two classes.

Only the training thread calls these; beside it only DataLoader's pin-memory thread calls CUDA. The
allocator's counters that a run records come from `stepscope.session.sampler.Readings`: this
thread reads them at its step boundaries, the sampler only inside long steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import psutil
import torch
from torch import Tensor

from stepscope.memory.allocator import COUNTS, read
from stepscope.recorder.cuda_readback import MetricRow, RowSink
from stepscope.run.status import shortage
from trainer.training.cuda_timing import CudaStepTimer, TimedScalars

RUN_AHEAD = 2
"""Steps that the host may queue ahead of the GPU: enough to keep it busy, few enough that a
button is served at once and the host's step time is the GPU's."""


class HostReader:
    """Logs the loop's rows with their scalars, which a CPU has at once. See `TimedScalars`."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self.dropped = 0

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Log the row with the scalars (0-d tensors) read into it."""
        for key, scalar in scalars.items():
            row[key] = scalar.item()
        self._sink(step, ts, row)

    def poll(self) -> None: ...

    def flush(self) -> None: ...

    def discard(self) -> None: ...


Reader = HostReader | TimedScalars


class CpuAccelerator:
    """A CPU: no cache, no queue, no peak of torch's own. Most methods do nothing here."""

    on_gpu = False
    device = torch.device("cpu")
    times = None

    def memory(self) -> dict[str, int]:
        """Return bytes by metric key."""
        return {"process/rss": psutil.Process().memory_info().rss}

    def release(self) -> None: ...

    def reset_peaks(self) -> None: ...

    def synchronize(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def pace(self) -> None: ...

    def reader(self, sink: RowSink) -> HostReader:
        """Return the reader of the loop's scalars."""
        return HostReader(sink)

    def rng_state(self) -> Tensor | None:
        """Return None: the default CPU generator is saved apart."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Ignore a GPU's generator state (a GPU checkpoint resumed on a CPU)."""


class CudaAccelerator:
    """One CUDA device, made the current one of this thread."""

    on_gpu = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._steps: deque[torch.cuda.Event] = deque()
        self.times = CudaStepTimer(self.device)

    def memory(self) -> dict[str, int]:
        """Bytes of torch's caching allocator by metric key; about 5 µs, no CUDA call."""
        counters = read(self.device.index)
        return {key: int(value) for key, value in counters.items() if key not in COUNTS}

    def free_memory(self) -> tuple[int, int]:
        """Return the bytes that new tensors could take, cache included, and those of the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        memory = self.memory()
        return free + memory["memory/reserved"] - memory["memory/allocated"], total

    def release(self) -> None:
        """Give back what a run leaves: step events, cuBLAS workspaces, both caches.

        Page-locked buffers have a cache of their own: without this they stay taken from the host.
        """
        self._steps.clear()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def reset_peaks(self) -> None:
        """Start the allocator's peaks again from the current values."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self.device)

    def begin_step(self) -> None:
        """Mark where the computing of a batch begins: before its forward pass."""
        self.times.begin_step()

    def end_step(self) -> None:
        """Mark where it ends: after its backward pass or the optimizer's update."""
        self.times.end_step()

    def pace(self) -> None:
        """Mark a step boundary and wait for the one RUN_AHEAD steps back.

        That step has nearly always ended: the GPU keeps RUN_AHEAD steps queued, so the wait
        costs no throughput.
        """
        event = self._steps.popleft() if len(self._steps) > RUN_AHEAD else None
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._steps.append(event)
        if len(self._steps) > RUN_AHEAD:
            began = time.perf_counter()
            self._steps[0].synchronize()
            self.times.waited(time.perf_counter() - began)

    def reader(self, sink: RowSink) -> TimedScalars:
        """Return the reader of the loop's scalars."""
        return TimedScalars(sink, self.times)

    def rng_state(self) -> Tensor | None:
        """Return the state of this device's default generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor) -> None:
        """Set the state of this device's default generator."""
        torch.cuda.set_rng_state(state, self.device)


Accelerator = CpuAccelerator | CudaAccelerator


def lost_device_reason(index: int | None) -> str | None:
    """Return what CUDA device `index` says where this process can no longer use it; None where it
    can, and for the CPU.

    Waits for the device: CUDA tells of a failed kernel at the next call, and from then on at every
    one, whatever the first of them made of it.
    """
    if index is None:
        return None
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        # Without memory for a context there is nothing that could be lost.
        return None if shortage(error) else str(error).strip().split("\n")[0].rstrip(".")
    return None
