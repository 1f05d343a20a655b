"""The differences between a CPU and a CUDA device, in two classes with one interface.

Used by the training thread only. The only other thread with CUDA calls is the pin-memory thread of
DataLoader. Memory metrics of a run come from `stepscope.session.sampler.Readings`.
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
"""Steps that the host may queue ahead of the GPU: enough to keep it busy, few enough for commands
without delay and for step times that equal the GPU's."""


class HostReader:
    """Logs rows with their scalars at once, for a CPU. See `TimedScalars`."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self.dropped = 0

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Log the row with the scalars (0-d tensors)."""
        for key, scalar in scalars.items():
            row[key] = scalar.item()
        self._sink(step, ts, row)

    def poll(self) -> None: ...

    def flush(self) -> None: ...

    def discard(self) -> None: ...


Reader = HostReader | TimedScalars


class CpuAccelerator:
    """A CPU, which has no cache, queue or peak statistics: most methods do nothing."""

    on_gpu = False
    device = torch.device("cpu")
    times = None

    def memory(self) -> dict[str, int]:
        """Return the process memory in bytes by metric key."""
        return {"process/rss": psutil.Process().memory_info().rss}

    def release(self) -> None: ...

    def reset_peaks(self) -> None: ...

    def synchronize(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def pace(self) -> None: ...

    def reader(self, sink: RowSink) -> HostReader:
        return HostReader(sink)

    def rng_state(self) -> Tensor | None:
        """Return None: checkpoints save the CPU generator separately."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Ignore the generator state of a GPU checkpoint."""


class CudaAccelerator:
    """A CUDA device, set as the current device of this thread."""

    on_gpu = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._steps: deque[torch.cuda.Event] = deque()
        self.times = CudaStepTimer(self.device)

    def memory(self) -> dict[str, int]:
        """Return bytes of the caching allocator by metric key, in 5 µs without a CUDA call."""
        counters = read(self.device.index)
        return {key: int(value) for key, value in counters.items() if key not in COUNTS}

    def free_memory(self) -> tuple[int, int]:
        """Return the bytes available for tensors, including cached ones, and the device's bytes."""
        free, total = torch.cuda.mem_get_info(self.device)
        memory = self.memory()
        return free + memory["memory/reserved"] - memory["memory/allocated"], total

    def release(self) -> None:
        """Free step events, cuBLAS workspaces, and the caches of device and pinned memory."""
        self._steps.clear()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def begin_step(self) -> None:
        self.times.begin_step()

    def end_step(self) -> None:
        self.times.end_step()

    def pace(self) -> None:
        """Record a step boundary and wait for the one RUN_AHEAD steps earlier."""
        event = self._steps.popleft() if len(self._steps) > RUN_AHEAD else None
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._steps.append(event)
        if len(self._steps) > RUN_AHEAD:
            began = time.perf_counter()
            self._steps[0].synchronize()  # costs no throughput: the GPU has RUN_AHEAD queued steps
            self.times.waited(time.perf_counter() - began)

    def reader(self, sink: RowSink) -> TimedScalars:
        return TimedScalars(sink, self.times)

    def rng_state(self) -> Tensor | None:
        """Return the state of this device's default generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)


Accelerator = CpuAccelerator | CudaAccelerator


def lost_device_reason(index: int | None) -> str | None:
    """Return the error of a CUDA device that this process can no longer use; None otherwise.

    Synchronizes: after a failed kernel every CUDA call raises.
    """
    if index is None:
        return None
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        # Without memory for a context there is nothing to lose.
        return None if shortage(error) else str(error).strip().split("\n")[0].rstrip(".")
    return None
