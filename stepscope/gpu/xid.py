"""Watch for Xid events, the driver's error messages, in a thread."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pynvml

from stepscope.gpu import nvml_device
from stepscope.gpu.machine_state import HealthStatus, XidEvent
from stepscope.gpu.nvml_device import PERMANENT, NvmlDevice, NvmlLibrary
from stepscope.gpu.source import DeviceSource

_NOTICE, _WARNING, _CRITICAL = HealthStatus.NOTICE, HealthStatus.WARNING, HealthStatus.CRITICAL
_XIDS = {
    13: ("a kernel caused an exception, such as an access out of bounds", _WARNING),
    31: ("a program accessed GPU memory that is not mapped", _WARNING),
    43: ("the GPU stopped processing a program, which ended", _NOTICE),
    45: ("programs were taken off the GPU after an earlier error", _WARNING),
    48: ("a memory error that ECC cannot correct", _CRITICAL),
    63: ("a bad row of memory was recorded to be replaced", _NOTICE),
    64: ("a bad row of memory could not be replaced", _CRITICAL),
    74: ("error of an NVLink connection", _CRITICAL),
    79: ("the GPU has fallen off the bus", _CRITICAL),
    92: ("many memory errors that ECC corrected", _NOTICE),
    94: ("a memory error that reached one program only", _WARNING),
    95: ("a memory error that may have reached several programs", _CRITICAL),
    109: ("the GPU did not change between programs in time", _CRITICAL),
    119: ("the GPU's system processor (GSP) did not answer", _CRITICAL),
    120: ("error of the GPU's system processor (GSP)", _CRITICAL),
    140: ("memory errors that ECC cannot correct", _CRITICAL),
    154: ("the driver has changed its recovery action for the GPU", _CRITICAL),
}
"""Code -> name and severity of the Xids that matter most; NVIDIA's page explains all."""
_OTHER = ("another error of the GPU or of a program", _WARNING)

log = logging.getLogger(__name__)

WAIT_MS = 500  # Timeout of a wait for events, and maximum duration of `stop`.
FALLEN_OFF_THE_BUS = 79


def xid_event(uuid: str, code: int) -> XidEvent:
    """Return the event of a code."""
    name, level = _XIDS.get(code, _OTHER)
    return XidEvent(uuid, code, f"Xid {code}: {name}", level)


class XidWatcher:
    """Watches for Xid events in the thread `stepscope-xid`, which calls `on_event`, until `stop`.

    `uuids` defaults to every GPU of `source`; GPUs in MIG mode are always watched. A lost GPU is
    registered again when it is found. The thread ends if no GPU supports events.
    """

    def __init__(
        self,
        source: DeviceSource,
        on_event: Callable[[XidEvent], None],
        *,
        uuids: Collection[str] | None = None,
    ) -> None:
        library = NvmlLibrary(time.monotonic)
        self._devices = {
            info.uuid: NvmlDevice(info.uuid, library)
            for info in source.devices()
            if uuids is None or info.uuid in uuids or info.mig
        }
        self._on_event = on_event
        self._stopping = threading.Event()
        self._registered: dict[int, str] = {}  # Address of the device -> UUID.
        self._error: str | None = None  # Why no GPU is watched.
        self._thread = threading.Thread(target=self._run, name="stepscope-xid", daemon=True)
        self._thread.start()

    def reason(self, uuid: str) -> str | None:
        """Return why a GPU is not watched; None if it is. Thread-safe."""
        device = self._devices.get(uuid)
        return self._error or (None if device is None else device.reason(_REGISTER))

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Stop the thread within WAIT_MS; return False if the thread lives after `timeout_s`."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._devices and not self._stopping.is_set():
            try:
                self._watch()
            except Exception as error:  # noqa: BLE001 - such as a GPU that is lost
                self._error = f"error: {error}"
                log.info("Xid events: %s; registering again", error)
            else:
                return
            self._stopping.wait(nvml_device.RETRY_S)

    def _watch(self) -> None:
        """Wait for events until `stop`, or until no GPU supports them. Raises NVMLError."""
        events = pynvml.nvmlEventSetCreate()
        self._registered = {}
        try:
            while not self._stopping.is_set():
                self._register(events)
                self._error = None
                if all(one.reason(_REGISTER) in PERMANENT for one in self._devices.values()):
                    return
                if self._registered:
                    self._wait(events)
                else:
                    self._stopping.wait(WAIT_MS / 1000)
        finally:
            with contextlib.suppress(pynvml.NVMLError):  # NVML may have been shut down
                pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any) -> None:
        """Register the reachable GPUs that are not registered."""
        registered = set(self._registered.values())
        for uuid, device in self._devices.items():
            address = None if uuid in registered else device.query(_REGISTER, events)
            if address is not None:
                self._registered[address] = uuid

    def _wait(self, events: Any) -> None:
        try:
            data = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return
            raise
        address = _address(data.device)
        uuid = self._registered.get(address)
        is_xid = data.eventType & pynvml.nvmlEventTypeXidCriticalError
        if uuid is None or not is_xid or self._stopping.is_set():
            return
        code = int(data.eventData)
        if code == FALLEN_OFF_THE_BUS:
            del self._registered[address]  # registered again when found
        self._on_event(xid_event(uuid, code))


def _register(handle: Any, events: Any) -> int:
    """Register a GPU for Xid events; return its address."""
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    return _address(handle)


_REGISTER = (_register,)


def _address(handle: Any) -> int:
    """Return the address in a handle, which identifies the device."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
