"""Watch for Xid events of the driver in a thread, and describe their codes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from stepscope.gpu.health import HealthStatus, XidRecord
from stepscope.gpu.nvml_device import BINDING_ERRORS
from stepscope.gpu.source import DeviceSource

RESTART_APP = "Restart the program."
CHECK_APP = "Restart the program; check it for memory accesses out of bounds."
RESET = "The GPU has to be reset (nvidia-smi --gpu-reset, or a restart of the machine)."
REBOOT = "Restart the machine; if it comes again, check power and seating of the GPU."
IGNORE = "Nothing has to be done now."
IGNORE_ONCE = "Nothing has to be done now; if it comes again, ask the GPU's vendor."
LINK = "The GPU has to be reset; if it comes again, check the NVLink connection."
ECC = "The memory error cannot be corrected: see Xid 94 or 95 for the affected programs."
FOLLOW = "Follow the advice of the errors before it."
VENDOR = "Ask the GPU's vendor if it comes again."
RECOVERY = "The Hardware page and nvidia-smi -q name it."

_COPY_ENGINE = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO = (60, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)
_CATALOG: tuple[tuple[Iterable[int], str, str], ...] = (  # Codes, text, NVIDIA's advice.
    ((8,), "the GPU stopped processing", RESTART_APP),
    ((11, 25), "invalid commands were sent to the GPU", CHECK_APP),
    ((13,), "a kernel caused an exception, such as an access out of bounds", CHECK_APP),
    ((31,), "a program accessed GPU memory that is not mapped", CHECK_APP),
    ((32,), "commands to the GPU were corrupted", CHECK_APP),
    ((37, 38), "error of the GPU's firmware", IGNORE_ONCE),
    (_COPY_ENGINE, "a copy engine failed", RESTART_APP),
    ((43,), "the GPU stopped processing a program, which ended", IGNORE_ONCE),
    ((44,), "fault while the GPU changed between programs", IGNORE_ONCE),
    ((45,), "programs were taken off the GPU after an earlier error", FOLLOW),
    ((46,), "the GPU stopped processing", RESET),
    ((48,), "a memory error that ECC cannot correct", ECC),
    ((54,), "the GPU's power cable is not connected", "Connect the power cable."),
    (_VIDEO, "an engine for video or pictures failed", RESTART_APP),
    ((62,), "the GPU's power controller halted", RESET),
    ((63,), "a bad row of memory was recorded to be replaced", IGNORE),
    ((64,), "a bad row of memory could not be replaced", RESET),
    ((66, 67), "illegal access by the driver", IGNORE_ONCE),
    ((68,), "the video decoder failed", RESTART_APP),
    ((69,), "a program used the GPU's engine wrongly", CHECK_APP),
    ((74, *range(144, 151), 155), "error of an NVLink connection", LINK),
    ((78,), "a virtual GPU could not start", "Update the driver and the vGPU software."),
    ((79,), "the GPU has fallen off the bus", REBOOT),
    ((80,), "corrupted data was sent to the GPU", CHECK_APP),
    ((92,), "many memory errors that ECC corrected", IGNORE_ONCE),
    ((93,), "the GPU's settings memory is written too often", IGNORE_ONCE),
    ((94,), "a memory error that reached one program only", RESTART_APP),
    ((95,), "a memory error that may have reached several programs", RESET),
    ((109,), "the GPU did not change between programs in time", RESET),
    ((110,), "security fault", RESET),
    ((119,), "the GPU's system processor (GSP) did not answer", RESET),
    ((120,), "error of the GPU's system processor (GSP)", RESET),
    ((121,), "error of the link between GPU and CPU", IGNORE_ONCE),
    ((136,), "an NVLink connection could not be set up", LINK),
    ((137,), "a program accessed memory over NVLink without permission", CHECK_APP),
    ((140,), "memory errors that ECC cannot correct", RESET),
    ((141,), "error on CUDA's fast path", IGNORE_ONCE),
    ((143,), "the GPU could not be started", RESET),
    ((151,), "the encryption key could not be changed", "Restart the virtual machine."),
    ((154,), "the driver has changed its recovery action for the GPU", RECOVERY),
    ((156,), "a part of the GPU was put out of use", RESET),
    ((157,), "a part of the GPU could not be put out of use", IGNORE_ONCE),
    ((158,), "the GPU did not answer in time", RESET),
    ((999,), "the driver cannot name the error", VENDOR),
)
_KNOWN = {code: (text, advice) for codes, text, advice in _CATALOG for code in codes}
_UNKNOWN = ("an error that NVIDIA's catalog does not explain", VENDOR)

log = logging.getLogger(__name__)

WAIT_MS = 500  # Timeout of a wait for events, and maximum duration of `stop`.
LOOK_AGAIN_S = 5.0  # Retry interval for missing GPUs, and after a failed event set.
NO_INSTANCE = 0xFFFFFFFF
FALLEN_OFF_THE_BUS = 79


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One Xid event: GPU, code, meaning, NVIDIA's advice, id of the MIG instance."""

    uuid: str
    code: int
    text: str
    advice: str
    gpu_instance: int | None


class UnsupportedError(Exception):
    """No GPU here can be watched; the message is the reason."""


class XidWatcher:
    """Watches for Xid events in the thread `stepscope-xid`, which calls `on_event`, until `stop`.

    `uuids` defaults to every GPU of `source`; GPUs in MIG mode are always watched. A lost GPU is
    registered again when it is found.
    """

    def __init__(
        self,
        source: DeviceSource,
        on_event: Callable[[XidEvent], None],
        *,
        uuids: Collection[str] | None = None,
    ) -> None:
        self._uuids = [
            info.uuid
            for info in source.devices()
            if uuids is None or info.uuid in uuids or info.mig
        ]
        self._on_event = on_event
        self._stopping = threading.Event()
        self._registered: dict[int, str] = {}
        self.reason: str | None = None  # Reason for the end of the thread.
        self.refused: Mapping[str, str] = {}  # Reasons for unsupported GPUs, by UUID.
        self._thread = threading.Thread(target=self._run, name="stepscope-xid", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Stop the thread within WAIT_MS; return False if the thread lives after `timeout_s`."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._watch()
                self._stopping.wait(LOOK_AGAIN_S)
        except UnsupportedError as error:
            self.reason = str(error)
            log.info("Xid events are not watched: %s", error)
        except (pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
            self.reason = f"{type(error).__name__}: {error}"
            log.warning("Xid events are no longer watched: %s", self.reason)

    def _watch(self) -> None:
        """Wait for events until the event set fails or `stop`. Raises UnsupportedError."""
        events = None
        try:
            events = _asked(pynvml.nvmlEventSetCreate)
            self._registered, look_at = {}, -math.inf
            while not self._stopping.is_set():
                missing = not self._registered or len(self._registered) < len(self._uuids)
                if missing and time.monotonic() >= look_at:
                    self._register(events)  # first all GPUs, then the lost GPUs
                    look_at = time.monotonic() + LOOK_AGAIN_S
                if not self._registered:
                    break
                self._wait(events)
        except pynvml.NVMLError as error:  # such as a GPU that is lost
            log.info("Xid events: %s; registering again", error)
        finally:
            if events is not None:
                with contextlib.suppress(pynvml.NVMLError):  # NVML may have been shut down
                    pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any) -> None:
        """Register the reachable GPUs. Raises UnsupportedError if all are unsupported."""
        known = set(self._registered.values())
        for uuid in [uuid for uuid in self._uuids if uuid not in known]:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                _asked(pynvml.nvmlDeviceRegisterEvents, handle, _xid_type(), events)
            except UnsupportedError as error:
                self.refused = {**self.refused, uuid: str(error)}
                self._uuids = [other for other in self._uuids if other != uuid]
            except pynvml.NVMLError as error:
                log.info("Xid events of %s: %s", uuid, error)
            else:
                self._registered[_number(handle)] = uuid
        if not self._uuids:
            raise UnsupportedError(", ".join(dict.fromkeys(self.refused.values())) or "no GPU")

    def _wait(self, events: Any) -> None:
        try:
            data = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return
            raise
        number, code = _number(data.device), int(data.eventData)
        uuid = self._registered.get(number)
        if uuid is None or not data.eventType & _xid_type() or self._stopping.is_set():
            return
        if code == FALLEN_OFF_THE_BUS:
            del self._registered[number]  # registered again when found
        self._on_event(xid_event(uuid, code, int(data.gpuInstanceId)))


def xid_event(uuid: str, code: int, gpu_instance: int) -> XidEvent:
    """Return the event of a code; `gpu_instance` is NO_INSTANCE for a whole GPU."""
    text, advice = _KNOWN.get(code, _UNKNOWN)
    instance = gpu_instance if gpu_instance != NO_INSTANCE else None
    return XidEvent(uuid, code, f"Xid {code}: {text}", advice, instance)


def _asked(call: Callable[..., Any], *args: Any) -> Any:
    """Call the driver. Raises UnsupportedError for a permanent failure, else NVMLError."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value in (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            raise UnsupportedError(str(error)) from error
        raise


def _xid_type() -> int:
    return int(pynvml.nvmlEventTypeXidCriticalError)


def _number(handle: Any) -> int:
    """Return the address in a handle, which identifies the device."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


KEPT = 20  # Maximum number of events of a GPU.
LEVELS = {
    IGNORE: HealthStatus.NOTICE,
    IGNORE_ONCE: HealthStatus.NOTICE,
    RESTART_APP: HealthStatus.WARNING,
    CHECK_APP: HealthStatus.WARNING,
    VENDOR: HealthStatus.WARNING,
    FOLLOW: HealthStatus.WARNING,  # also of a killed program
}
"""Severity by NVIDIA's advice; all other advice concerns the GPU or the machine."""


class XidLog:
    """Keeps the newest Xid events of every GPU. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[float, XidEvent]]] = {}

    def add(self, ts: float, event: XidEvent) -> None:
        """Add an event of the time `ts` (epoch seconds)."""
        self._known.setdefault(event.uuid, deque(maxlen=KEPT)).append((ts, event))

    def of(self, uuid: str, ts: float) -> tuple[XidRecord, ...]:
        """Return the events of a GPU with their ages at `ts`, oldest first."""
        level = HealthStatus.CRITICAL
        return tuple(
            XidRecord(
                one.code, one.text, one.advice, LEVELS.get(one.advice, level), max(0.0, ts - at)
            )
            for at, one in tuple(self._known.get(uuid, ()))
        )
