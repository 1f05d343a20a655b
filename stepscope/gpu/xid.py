"""Xid errors as they happen, waited for on a thread of their own.

The driver tells only of errors after the registration. Where events are not supported (Windows,
WSL, some virtual GPUs) the watch ends and says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from stepscope.gpu.nvml_device import BINDING_ERRORS
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.xid_catalog import meaning

log = logging.getLogger(__name__)

WAIT_MS = 500
"""How long a wait for events lasts, and so a stop."""
LOOK_AGAIN_S = 5.0
"""For GPUs, after an event set that failed."""
NO_INSTANCE = 0xFFFFFFFF
FALLEN_OFF_THE_BUS = 79
UNKNOWN = 999
"""The driver's number for an error that it cannot name."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One error: GPU `uuid`, the number, what it means, what NVIDIA advises, its MIG instance."""

    uuid: str
    code: int
    text: str
    advice: str
    gpu_instance: int | None


class Unsupported(Exception):
    """No GPU here can be watched; the message says why."""


class XidWatch:
    """Waits for Xid errors on the thread `stepscope-xid`, from the start to `stop`.

    `on_event` is called on that thread. `uuids` None means every GPU of `source`; errors of a MIG
    instance come from its GPU, so GPUs in MIG mode are always watched. A GPU that was lost is
    registered again when it is back.
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
        self.reason: str | None = None
        """Why nothing is watched any more."""
        self.refused: Mapping[str, str] = {}
        """Why some GPUs are not watched, by UUID."""
        self._thread = threading.Thread(target=self._run, name="stepscope-xid", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the watch: nothing is told any more; False if the thread lives after `timeout_s`.

        It ends when its wait for events does, half a second later at most.
        """
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._watch()
                self._stopping.wait(LOOK_AGAIN_S)
        except Unsupported as why:
            self.reason = str(why)
            log.info("Xid errors are not watched: %s", why)
        except (pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
            self.reason = f"{type(error).__name__}: {error}"
            log.warning("Xid errors are not watched any more: %s", self.reason)

    def _watch(self) -> None:
        """Wait for events until the set fails or the watch is stopped. Raises Unsupported."""
        events = None
        try:
            events = _asked(pynvml.nvmlEventSetCreate)
            self._registered = {}
            self._register(events)
            look_at = time.monotonic() + LOOK_AGAIN_S
            while self._registered and not self._stopping.is_set():
                self._wait(events)
                if len(self._registered) < len(self._uuids) and time.monotonic() >= look_at:
                    self._register(events)  # of those that were lost
                    look_at = time.monotonic() + LOOK_AGAIN_S
        except pynvml.NVMLError as error:  # such as a GPU that is lost
            log.info("Xid events: %s; registering again", error)
        finally:
            if events is not None:
                _free(events)

    def _register(self, events: Any) -> None:
        """Register the GPUs that are there. Raises Unsupported if none can ever be."""
        known = set(self._registered.values())
        for uuid in [uuid for uuid in self._uuids if uuid not in known]:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                _asked(pynvml.nvmlDeviceRegisterEvents, handle, _xid_type(), events)
            except Unsupported as why:
                self.refused = {**self.refused, uuid: str(why)}
                self._uuids = [other for other in self._uuids if other != uuid]
            except pynvml.NVMLError as error:
                log.info("Xid events of %s: %s", uuid, error)
            else:
                self._registered[_number(handle)] = uuid
        if not self._uuids:
            raise Unsupported(", ".join(dict.fromkeys(self.refused.values())) or "no GPU")

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
            del self._registered[number]  # to be registered again once it is back
        self._on_event(xid_event(uuid, code, int(data.gpuInstanceId)))


def xid_event(uuid: str, code: int, gpu_instance: int) -> XidEvent:
    """Put an error into words; NVML's all-ones stand for no MIG instance."""
    known = meaning(code)
    words = "the driver cannot name the error" if code == UNKNOWN else known.text
    instance = gpu_instance if gpu_instance != NO_INSTANCE else None
    return XidEvent(uuid, code, f"Xid {code}: {words}", known.advice, instance)


def _asked(call: Callable[..., Any], *args: Any) -> Any:
    """Call the driver. Raises Unsupported for a refusal that stays, else what pynvml raises."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value in (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            raise Unsupported(str(error)) from error
        raise


def _xid_type() -> int:
    return int(pynvml.nvmlEventTypeXidCriticalError)


def _number(handle: Any) -> int:
    """Return what tells a handle from others: the address that it holds."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _free(events: Any) -> None:
    with contextlib.suppress(pynvml.NVMLError):  # it may have ended with NVML
        pynvml.nvmlEventSetFree(events)
