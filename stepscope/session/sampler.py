"""The 10 Hz thread that records memory, host and GPU values of a run; it calls no CUDA."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from stepscope.distributed.collective_metrics import CollectiveMetrics
from stepscope.gpu.device_events import DeviceEventDetector
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.process_memory import ProcessMemoryTracker
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.gpu.xid import XidEvent, XidWatcher
from stepscope.host.usage import HostSampler
from stepscope.memory import allocator
from stepscope.memory.model_states import ModelStateTracker
from stepscope.recorder.recorder import Recorder

log = logging.getLogger(__name__)

PERIODS_S = {SamplingTier.MEDIUM: 0.5, SamplingTier.SLOW: 1.0, SamplingTier.RARE: 10.0}

T = TypeVar("T")


class Sampler:
    """Samples into `recorder` every `period_s` on one daemon thread, from `start()` to `stop()`.

    `allocator_index` is the CUDA index of the allocator, None for a run without CUDA. `gpu_uuids`
    None means every GPU of `source`; `source` None means this process's NVML. Of several processes
    on a machine only one samples the `host`.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        allocator_index: int | None = None,
        gpu_uuids: Sequence[str] | None = None,
        host: bool = True,
        source: DeviceSource | None = None,
        period_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0.01 <= period_s <= 60:
            raise ValueError(f"period_s: 0.01 to 60 s, got {period_s}. 0.1 is the default.")
        self._recorder = recorder
        self._host = HostSampler(clock=clock)
        self.readings = BoundarySampler(allocator_index, clock=clock, resident=self._host.resident)
        self.observers: list[Callable[[Mapping[str, float]], None]] = []
        """Called with the process's values at each tick, in the sampler's thread."""
        self._source = open_source() if source is None else source
        self._period_s = period_s
        self._clock = clock
        self._samples_host = host
        self._labels = {
            info.uuid: f"GPU {info.nvml_index} ({info.name})" for info in self._source.devices()
        }
        wanted = self._labels if gpu_uuids is None else gpu_uuids
        self._devices = {uuid: DeviceEventDetector(self._labels.get(uuid, uuid)) for uuid in wanted}
        self._sharing = ProcessMemoryTracker(self._source, clock)
        if allocator_index is not None and len(self._devices) == 1:
            (self._sharing.training,) = self._devices
        self._xid: XidWatcher | None = None
        self._due = dict.fromkeys(PERIODS_S, -math.inf)
        self._failed: dict[str, str] = {}
        self._told: set[str] = set()
        self._capabilities: dict[str, Any] = {}
        self._cost_s: float | None = None
        # Held while the thread runs: `acquire` with a timeout is a sleep that `release` ends, at
        # half the cost of Event.wait (28 us against 59 during training).
        self._ending = threading.Lock()
        self._ending.acquire()
        self._thread = threading.Thread(target=self._run, name="stepscope-sampler", daemon=True)

    def start(self) -> None:
        """Begin sampling with a tick at once. A sampler can be started only once."""
        self._begin_watching()
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End sampling; False if the thread is stuck in a driver call after `timeout_s`."""
        with contextlib.suppress(RuntimeError):  # released by an earlier stop
            self._ending.release()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._end_watching()
        if self._thread.is_alive():
            log.warning("stepscope-sampler did not end within %.1f s", timeout_s)
        return not self._thread.is_alive()

    def reset_process_peak(self) -> tuple[float, float]:
        """Reset `process/peak_rss`, from any thread; return its bytes (before, after)."""
        return self._host.reset_peak()

    def sample_only(self, uuid: str, label: str) -> None:
        """Sample only this GPU from now on, such as a MIG instance; from any thread."""
        self._devices = {uuid: DeviceEventDetector(label)}
        if self._thread.is_alive():
            self._begin_watching()

    def train_on(self, uuid: str | None) -> None:
        """Set the GPU on which this process trains (None: a CPU); from any thread."""
        self._sharing.training = uuid

    def tick(self) -> None:
        """Take one sample of everything that is due; `start()` calls this each period."""
        begun = self._clock()
        tiers = self._due_tiers(begun)
        self._sample_process(slow=SamplingTier.SLOW in tiers)
        for uuid, device in self._devices.items():
            self._guarded(uuid, self._sample_gpu, uuid, device, tiers)
        if SamplingTier.SLOW in tiers:
            self._describe()
        self._cost_s = self._clock() - begun

    def _run(self) -> None:
        # All processes of a machine tick together, so that the training threads of a job's ranks
        # read for them in the same step, and wait for each other once.
        deadline = self._clock() - time.time() % self._period_s
        while not self._ending.acquire(timeout=max(0.0, deadline - self._clock())):
            self._guarded("tick", self.tick)
            deadline = next_deadline(deadline, self._period_s, self._clock())

    def _due_tiers(self, now: float) -> list[SamplingTier]:
        """Return the tiers to read besides the fast one, up to half a period early."""
        due = [tier for tier, at in self._due.items() if now >= at - self._period_s / 2]
        for tier in due:
            self._due[tier] = now + PERIODS_S[tier]
        return due

    def _sample_process(self, *, slow: bool) -> None:
        values = self._guarded("process", self._host.process) or {}
        if slow:
            values |= self._guarded("children", self._host.children) or {}
            if self._samples_host:
                values |= self._guarded("host", self._host.host) or {}
        values |= self._guarded("allocator", self.readings.take) or {}
        values |= self._sharing.take_own()
        values |= self.readings.collectives.take()
        if self.readings.wanted:
            self._recorder.want_boundary()
        if self._cost_s is not None:
            values["sampler/cost"] = self._cost_s
        self._recorder.sample(values)
        for observer in self.observers:
            self._guarded("observer", observer, values)

    def _sample_gpu(
        self, uuid: str, device: DeviceEventDetector, tiers: list[SamplingTier]
    ) -> None:
        """Record one GPU and its events."""
        values = self._source.read(uuid, SamplingTier.FAST, *tiers)
        now = self._clock()
        if values and SamplingTier.SLOW in tiers:
            values |= self._sharing.look(uuid, values)
        if values:
            self._recorder.device(uuid, values)
        mask = values.get("gpu/throttle_reasons")
        events = device.events(now, mask, self._source.lost(uuid))
        if SamplingTier.RARE in tiers:
            events += device.health(values, self._source.recovery_action(uuid))
        for kind, text, data in events:
            self._recorder.event(kind, text, uuid=uuid, **data)

    def _describe(self) -> None:
        """Record why metrics are missing: on the first tick, then when it changes."""
        missing = {
            uuid: self._source.reasons(uuid) | self._sharing.reasons(uuid) for uuid in self._devices
        }
        no_allocator = allocator.reason()
        if self.readings.index is None:
            no_allocator = "the run has used no CUDA device"
        if self._xid is not None:
            for uuid in self._xid.refused.keys() & missing.keys():
                missing[uuid]["xid"] = self._xid.refused[uuid]
        capabilities = {
            "nvml": self._source.reason,
            "allocator": no_allocator,
            "parts": self.readings.parts.reason,
            "missing": missing,
            "failed": dict(self._failed),
        }
        optional = {
            "collectives": self.readings.collectives.reasons() or None,
            "split": None if no_allocator else allocator.split_reason(),
            "xid": None if self._xid is None else self._xid.reason,
        }
        capabilities |= {key: why for key, why in optional.items() if why is not None}
        if capabilities != self._capabilities:
            self._capabilities = capabilities
            self._recorder.describe(capabilities=capabilities)
        lists = self._sharing.changed()
        if lists is not None:
            self._recorder.describe(gpu_processes=lists)

    def _on_xid(self, event: XidEvent) -> None:
        """Record an error of a GPU; called on the thread that waits for them."""
        device = self._devices.get(event.uuid)
        parent = self._labels.get(event.uuid, "GPU")  # of the instance that is sampled
        label = parent if device is None else device.label
        data = {name: getattr(event, name) for name in ("uuid", "code", "advice", "gpu_instance")}
        self._recorder.event("xid", f"{label}: {event.text}. {event.advice}", **data)

    def _begin_watching(self) -> None:
        """Have activity counters read, and errors of the GPUs waited for, if there are GPUs."""
        if self._xid is None and self._source.reason is None and self._devices:
            self._source.arm_gpm(True)
            self._xid = XidWatcher(self._source, self._on_xid, uuids=frozenset(self._devices))

    def _end_watching(self) -> None:
        """Undo `_begin_watching`; the thread that waits for events ends in half a second."""
        watch, self._xid = self._xid, None
        if watch is not None:
            self._source.arm_gpm(False)
            watch.stop(timeout_s=0.0)

    def _guarded(self, what: str, call: Callable[..., T], *args: Any) -> T | None:
        try:
            answer = call(*args)
        except Exception as error:  # an error of one source must not stop the others
            self._failed[what] = f"{type(error).__name__}: {error}"
            if what not in self._told:
                self._told.add(what)
                log.warning("sampling %s failed; its values may be missing", what, exc_info=True)
            return None
        self._failed.pop(what, None)
        return answer


def next_deadline(deadline: float, period_s: float, now: float) -> float:
    """Return the next time of a tick after `now`; ticks that were missed are skipped."""
    missed = max(0, math.floor((now - deadline) / period_s))
    return deadline + (missed + 1) * period_s


REPEATED_S = 5.0  # how long a reading is repeated: in a longer phase the counters are not known


class BoundarySampler:
    """The counters of one run, read by the training thread and returned to the sampler by `take`.

    Another thread that waited for the lock of torch's allocator would stop all Python threads. So
    the training thread reads when `wanted`, at most once a tick: at its step boundaries (`serve`)
    and between the phases of a step (`look`). Inside a phase the latest reading is repeated, for
    REPEATED_S at most. Retries and failures of allocations count from the construction on.

    `index` is the CUDA index of the allocator, None without CUDA or before it is known. About once
    a second a boundary also measures `parts` and, without an allocator, the `resident` bytes. In a
    distributed job it also reads the `collectives`, every 1 to 64 s.
    """

    def __init__(
        self,
        index: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], float] | None = None,
    ) -> None:
        self.index: int | None = None
        self.parts = ModelStateTracker(clock=clock)
        self.collectives = CollectiveMetrics(clock=clock)
        self.wanted = False
        """The sampler asks for a reading. Every boundary checks this, and calls `serve`."""
        self._clock = clock
        self._before = allocator.counts_by_device()
        self._latest: dict[str, float] = {}
        self._resident = resident
        self._split: dict[str, float] = {}
        """What fills the memory, measured with `_latest` and not taken yet."""
        self._read_at = self._asked_at = clock()
        self._error: Exception | None = None
        self.begin(index)

    def begin(self, index: int | None) -> None:
        """Read this device from now on; in the training thread."""
        self.index = index
        self._read_now(self._clock())

    def read(self) -> dict[str, float]:
        """Read now, in the training thread; {} where `reason()` says why."""
        index = self.index
        if index is None:
            return {}
        values, before = allocator.read(index), self._before.get(index, {})
        for key, base in before.items():
            if values.get(key, base) < base:  # the script has set torch's counters back
                before[key] = 0.0
        return {key: value - before.get(key, 0.0) for key, value in values.items()}

    def serve(self) -> float:
        """Read at a boundary, in the training thread; return the seconds of optional readings."""
        now = self._clock()
        other_s = self.parts.find() + self.collectives.read()
        self._read_now(now + other_s)
        return other_s

    def look(self) -> None:
        """Read the counters if the sampler still waits for them, in the training thread."""
        if self.wanted and self._read_at < self._asked_at:
            self._read_counters(self._clock())

    def _read_now(self, now: float) -> None:
        self.wanted = False
        self._read_counters(now)
        if self.parts.is_due(now):
            split = self.parts.read(self.index)
            if split and self.index is None and self._resident is not None:
                split["process/rss"] = self._resident()
            self._split = split

    def _read_counters(self, now: float) -> None:
        try:
            self._latest, self._read_at, self._error = self.read(), now, None
        except Exception as error:  # noqa: BLE001 - of torch, and no reason to end a training
            self._error = error

    @contextmanager
    def then_read(self) -> Iterator[None]:
        """Read at once after what the training thread does to the allocator within."""
        try:
            yield
        finally:
            self.serve()

    def take(self) -> dict[str, float]:
        """Return the latest counters, {} if too old, and ask for the next; in the sampler's thread.

        Raises the error of the latest reading. The parts of the memory are returned once.
        """
        now = self._clock()
        split, self._split = self._split, {}
        if self.index is None:
            self.wanted = self.wanted or self.parts.is_due(now) or self.collectives.is_due()
            return split
        if self._asked_at <= self._read_at:
            self._asked_at = now
        self.wanted = True
        if self._error is not None:
            raise self._error
        return self._latest | split if now - self._read_at <= REPEATED_S else {}
