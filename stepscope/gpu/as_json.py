"""A machine as JSON values, for `stepscope devices --json` and for the page.

Metrics stand under their keys (`docs/metrics.md`) in their stored units. A metric without a value
is left out, and `missing` has the reason.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stepscope.gpu.machine_state import DeviceView, MachineView
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.throttle_time import throttle_text

Json = dict[str, Any]


def machine_json(view: MachineView) -> Json:
    """Return everything that is known of the machine at one moment."""
    return {
        "ts": view.ts,
        "since": view.since,
        "reason": view.reason,
        "devices": [device_json(device) for device in view.devices],
        "host": asdict(view.host),
    }


def device_json(device: DeviceView) -> Json:
    """Return a GPU with its MIG instances, which have the same form."""
    energy = device.energy
    return {
        "uuid": device.info.uuid,
        "name": device.info.name,
        "index": device.info.nvml_index,
        "mig": device.info.mig,
        "facts": None if device.facts is None else asdict(device.facts),
        "values": dict(device.values),
        "ages": {key: round(age, 3) for key, age in device.ages.items()},
        "missing": dict(device.missing),
        "lost": device.lost,
        "health": {
            "level": device.health.level.value,
            "text": device.health.text,
            "signs": [
                {"level": sign.level.value, "text": sign.text} for sign in device.health.signs
            ],
        },
        "throttled": {
            "window_s": device.throttle_window_s,
            "text": throttle_text(device.throttled, device.throttle_window_s),
            "seconds": {time.key: time.seconds for time in device.throttled},
        },
        "energy": None if energy is None else asdict(energy),
        "xids": [asdict(xid) for xid in device.xids],
        "processes": None
        if device.processes is None
        else [process_json(process) for process in device.processes],
        "instances": [device_json(instance) for instance in device.instances],
    }


def process_json(process: GpuProcess) -> Json:
    """Return a process that uses a GPU."""
    return {**asdict(process), "kind": str(process.kind), "state": str(process.state)}
