"""Record memory, host and GPU values of a run in a 10 Hz thread that calls no CUDA."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from stepscope.gpu.health import XID_PAGE, DeviceEventDetector
from stepscope.gpu.machine_state import XidEvent
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.process_memory import ProcessMemoryTracker
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.gpu.xid import XidWatcher
from stepscope.host.usage import HostSampler
from stepscope.memory import allocator
from stepscope.memory.model_states import ModelStateTracker
from stepscope.session.code_sampler import TrainingThread
from stepscope.store.recorder import Recorder

log = logging.getLogger(__name__)

PERIODS_S = {SamplingTier.MEDIUM: 0.5, SamplingTier.SLOW: 1.0, SamplingTier.RARE: 10.0}

T = TypeVar("T")


class Sampler:
    """Samples into `recorder` every `period_s` on one daemon thread, from `start()` to `stop()`.

    `allocator_index` is a CUDA index, None without CUDA. `gpu_uuids` defaults to every GPU of
    `source`, `source` to NVML. Only one process of a run samples the `host` of a machine. `thread`
    learns which thread trains.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        allocator_index: int | None = None,
        gpu_uuids: Sequence[str] | None = None,
        host: bool = True,
        source: DeviceSource | None = None,
        thread: TrainingThread | None = None,
        period_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self.host = HostSampler(clock)
        self.readings = BoundarySampler(
            allocator_index,
            clock=clock,
            resident=self.host.resident,
            thread=thread or TrainingThread(),
        )
        self.observers: list[Callable[[Mapping[str, float]], None]] = []
        """Callbacks for the process's values at each tick, in the sampler thread."""
        self.on_wake: Callable[[float], None] | None = None
        """Called before each tick with the seconds since its time, in the sampler thread."""
        self._source = open_source() if source is None else source
        self._period_s = period_s
        self._clock = clock
        self._samples_host = host
        self._labels = {
            info.uuid: f"GPU {info.nvml_index} ({info.name})" for info in self._source.devices()
        }
        uuids = self._labels if gpu_uuids is None else gpu_uuids
        self._devices = {uuid: DeviceEventDetector(self._labels.get(uuid, uuid)) for uuid in uuids}
        self._sharing = ProcessMemoryTracker(self._source, clock)
        if allocator_index is not None and len(self._devices) == 1:
            (self._sharing.training,) = self._devices
        self._xid: XidWatcher | None = None
        self._due = dict.fromkeys(PERIODS_S, -math.inf)
        self._logged: set[str] = set()
        self._capabilities: dict[str, Any] = {}
        self._cost_s: float | None = None
        # `acquire` with a timeout is a sleep that `release` ends, at half the cost of Event.wait
        # (28 us against 59 during training).
        self._ending = threading.Lock()
        self._ending.acquire()
        self._thread = threading.Thread(target=self._run, name="stepscope-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread, which samples immediately. A sampler can be started only once."""
        self._begin_watching()
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End sampling; return False if a driver call blocks the thread after `timeout_s`."""
        with contextlib.suppress(RuntimeError):  # released by an earlier stop
            self._ending.release()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        watcher, self._xid = self._xid, None
        if watcher is not None:  # its thread ends within half a second
            watcher.stop(timeout_s=0.0)
        if self._thread.is_alive():
            log.warning("stepscope-sampler did not end within %.1f s", timeout_s)
        return not self._thread.is_alive()

    def sample_only(self, uuid: str, label: str) -> None:
        """Restrict sampling to this GPU or MIG instance. Thread-safe."""
        self._devices = {uuid: DeviceEventDetector(label)}
        if self._thread.is_alive():
            self._begin_watching()

    def train_on(self, uuid: str | None) -> None:
        """Set the GPU on which this process trains (None: a CPU). Thread-safe."""
        self._sharing.training = uuid

    def tick(self) -> None:
        """Sample all metrics that are due; the thread calls this once per period."""
        begun = self._clock()
        # Up to half a period early.
        tiers = [tier for tier, at in self._due.items() if begun >= at - self._period_s / 2]
        self._due |= {tier: begun + PERIODS_S[tier] for tier in tiers}
        self._sample_process(slow=SamplingTier.SLOW in tiers)
        for uuid, device in self._devices.items():
            self._guarded(uuid, self._sample_gpu, uuid, device, tiers)
        if SamplingTier.SLOW in tiers:
            self._describe()
        self._cost_s = self._clock() - begun

    def _run(self) -> None:
        # All processes of a machine tick together: a job's ranks read in the same step, and so wait
        # for each other once.
        deadline = self._clock() - time.time() % self._period_s
        while not self._ending.acquire(timeout=max(0.0, deadline - self._clock())):
            if self.on_wake is not None:
                self._guarded("code", self.on_wake, self._clock() - deadline)
            self._guarded("tick", self.tick)
            deadline = next_deadline(deadline, self._period_s, self._clock())

    def _sample_process(self, *, slow: bool) -> None:
        values = self._guarded("process", self.host.process) or {}
        if slow:
            values |= self._guarded("children", self.host.children) or {}
            if self._samples_host:
                values |= self._guarded("host", self.host.host) or {}
        values |= self._guarded("allocator", self.readings.take) or {}
        values |= self._sharing.take_own()
        if self.readings.wanted:
            self._recorder.request_boundary()
        if self._cost_s is not None:
            values["sampler/cost"] = self._cost_s
        self._recorder.sample(values)
        for observer in self.observers:
            self._guarded("observer", observer, values)

    def _sample_gpu(
        self, uuid: str, device: DeviceEventDetector, tiers: list[SamplingTier]
    ) -> None:
        values = self._source.read(uuid, SamplingTier.FAST, *tiers)
        now = self._clock()
        if values and SamplingTier.SLOW in tiers:
            values |= self._sharing.update(uuid, values)
        if values:
            self._recorder.sample(values, uuid)
        mask = values.get("gpu/throttle_reasons")
        events = device.events(now, mask, self._source.lost(uuid))
        if SamplingTier.RARE in tiers:
            events += device.memory_errors(values)
        for kind, text, data in events:
            self._recorder.event(kind, text, uuid=uuid, **data)

    def _describe(self) -> None:
        """Record why metrics are missing: on the first tick, then after each change."""
        missing = {
            uuid: self._source.reasons(uuid) | self._sharing.reasons(uuid) for uuid in self._devices
        }
        no_allocator = allocator.reason()
        if self.readings.index is None:
            no_allocator = "the run has used no CUDA device"
        capabilities: dict[str, Any] = {
            "nvml": self._source.reason,
            "allocator": no_allocator,
            "parts": self.readings.parts.reason,
            "missing": missing,
        }
        split = None if no_allocator else allocator.split_reason()
        if split is not None:
            capabilities["split"] = split
        if capabilities != self._capabilities:
            self._capabilities = capabilities
            self._recorder.describe(capabilities=capabilities)
        lists = self._sharing.changed()
        if lists is not None:
            self._recorder.describe(gpu_processes=lists)

    def _on_xid(self, event: XidEvent) -> None:
        """Record an Xid event; called on the thread of `XidWatcher`."""
        device = self._devices.get(event.uuid)
        # An unknown UUID is that of the parent of the MIG instance that is sampled.
        label = self._labels.get(event.uuid, "GPU") if device is None else device.label
        self._recorder.event(
            "xid",
            f"{label}: {event.text}. See {XID_PAGE}",
            uuid=event.uuid,
            code=event.code,
        )

    def _begin_watching(self) -> None:
        """Watch for Xid events if there are GPUs."""
        if self._xid is None and self._source.reason is None and self._devices:
            self._xid = XidWatcher(self._source, self._on_xid, uuids=frozenset(self._devices))

    def _guarded(self, what: str, call: Callable[..., T], *args: Any) -> T | None:
        try:
            return call(*args)
        except Exception:  # an error of one source must not stop the others
            if what not in self._logged:
                self._logged.add(what)
                log.warning("sampling %s failed; its values may be missing", what, exc_info=True)
            return None


def next_deadline(deadline: float, period_s: float, now: float) -> float:
    """Return the time of the next tick after `now`; missed ticks are skipped."""
    missed = max(0, math.floor((now - deadline) / period_s))
    return deadline + (missed + 1) * period_s


REPEATED_S = 5.0  # Maximum age of a repeated reading; in a longer phase the counters are unknown.


class BoundarySampler:
    """Reads the counters of one run in the training thread; `take` returns them to the sampler.

    Another thread that waited for the lock of torch's allocator would block all Python threads. So
    the training thread reads when `wanted`, at most once a tick: at its step boundaries (`serve`)
    and between the phases of a step (`read_if_requested`). During a phase `take` repeats the latest
    reading, for REPEATED_S at most. Allocation retries and failures are counted from the
    construction on.
    `index` is the CUDA index of the allocator, None if there is none. About once a second a
    boundary also measures `parts` and, without an allocator, the `resident` bytes.
    """

    def __init__(
        self,
        index: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], float] | None = None,
        thread: TrainingThread | None = None,
    ) -> None:
        self.index: int | None = None
        self._thread = thread or TrainingThread()
        self.parts = ModelStateTracker(clock=clock)
        self.wanted = False
        """True while the sampler requests a reading. Every boundary checks this flag."""
        self._clock = clock
        self._before = allocator.counts_by_device()
        self._latest: dict[str, float] = {}
        self._resident = resident
        self._split: dict[str, float] = {}
        """The model states in bytes, measured with `_latest` and not taken yet."""
        self._read_at = self._asked_at = clock()
        self._error: Exception | None = None
        self.begin(index)

    def begin(self, index: int | None) -> None:
        """Set the device and read it. Training thread only."""
        self.index = index
        self._thread.claim()
        self._read_now(self._clock())

    def read(self) -> dict[str, float]:
        """Return the present counters; {} without an allocator. Training thread only."""
        if self.index is None:
            return {}
        values, before = allocator.read(self.index), self._before.get(self.index, {})
        for key, base in before.items():
            if values.get(key, base) < base:  # the script has reset torch's counters
                before[key] = 0.0
        return {key: value - before.get(key, 0.0) for key, value in values.items()}

    def serve(self) -> float:
        """Read at a boundary; return the seconds of optional readings. Training thread only."""
        now = self._clock()
        self._thread.claim()
        other_s = self.parts.find()
        self._read_now(now + other_s)
        return other_s

    def read_if_requested(self) -> None:
        """Read the counters if the sampler's request is still pending. Training thread only."""
        if self.wanted and self._read_at < self._asked_at:
            self._read_counters(self._clock())

    def _read_now(self, now: float) -> None:
        self.wanted = False
        self._read_counters(now)
        if self.parts.is_due(now):
            split = self.parts.read(self.index)
            if split and self.index is None and self._resident is not None:
                with contextlib.suppress(Exception):  # the script may have too many open files
                    split["process/rss"] = self._resident()
            self._split = split

    def _read_counters(self, now: float) -> None:
        try:
            self._latest, self._read_at, self._error = self.read(), now, None
        except Exception as error:  # noqa: BLE001 - an error of torch must not end a training
            self._error = error

    @contextmanager
    def then_read(self) -> Iterator[None]:
        """Read immediately after the block, which changes the allocator. Training thread only."""
        try:
            yield
        finally:
            self.serve()

    def take(self) -> dict[str, float]:
        """Return the latest counters, {} if too old, and request the next. Sampler thread only.

        Raises the error of the latest reading. Each measurement of model states is returned once.
        """
        now = self._clock()
        split, self._split = self._split, {}
        if self.index is None:
            self.wanted = self.wanted or self.parts.is_due(now)
            return split
        self._asked_at = now
        self.wanted = True
        if self._error is not None:
            raise self._error
        return self._latest | split if now - self._read_at <= REPEATED_S else {}
