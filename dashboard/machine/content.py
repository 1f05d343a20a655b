"""What the page Devices shows of a machine, as JSON of ready words; pure.

The browser only lays it out: all text goes in as text, as names and commands come from others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import format_bytes
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState
from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NOT_BY_GPU
from stepscope.gpu.processes import GpuProcess

Json = dict[str, Any]

NO_GPU = (
    "Only host data is shown until there is a GPU; checked every 30 s. Training on the CPU "
    "needs no GPU. To use one, install its driver so that nvidia-smi lists it; start "
    "containers with --gpus all. `stepscope doctor` says what is missing."
)


def machine_content(view: MachineState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    """Return the page but for the details of a GPU.

    `cuda` has torch's index of each GPU that this server can train on, by UUID. `ours` has the
    names of recorded runs by the number of their process.
    """
    return {
        "ts": view.ts,
        "host": host_content(view.host),
        "none": None if view.reason is None else {"reason": view.reason, "next": NO_GPU},
        "summary": _summary(view.devices),
        "cards": [card(device, cuda, ours) for device in view.devices],
    }


def host_content(host: HostState) -> Json:
    """Return the card of the machine."""
    share = 100 * host.memory_used / host.memory_total if host.memory_total else None
    return {
        "name": host.name,
        "cpu": {"share": host.cpu_percent, "text": _percent(host.cpu_percent)},
        "memory": {"share": share, "text": of_total(host.memory_used, host.memory_total)},
        "facts": [
            ["Processor", f"{host.cpu}, {host.cores or '?'} cores"],
            ["Driver", host.driver or "none"],
            ["CUDA of the driver", host.cuda or "none"],
            ["PyTorch", host.torch or "not installed here"],
            ["Python", host.python],
            ["System", host.platform],
        ],
    }


def _summary(devices: tuple[DeviceState, ...]) -> str:
    """Return one line on all GPUs together."""
    if not devices:
        return ""
    loads = [device.values["gpu/util"] for device in devices if "gpu/util" in device.values]
    powers = [device.values["gpu/power"] for device in devices if "gpu/power" in device.values]
    parts = [f"{len(devices)} GPU{'' if len(devices) == 1 else 's'}"]
    parts += [f"{sum(loads) / len(loads):.0f} % used on average"] if len(loads) > 1 else []
    parts += [f"{sum(powers):,.0f} W together"] if len(powers) > 1 else []
    return " · ".join(parts)


def card(device: DeviceState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    """Return one GPU as a card; `worse` counts what the details say beyond the line of health."""
    index = cuda.get(device.info.uuid)
    return {
        "uuid": device.info.uuid,
        "title": f"GPU {device.info.nvml_index}",
        "cuda": None if index is None else f"cuda:{index}",
        "name": device.info.name,
        "short": short_uuid(device.info.uuid),
        "level": device.health.level.value,
        "health": device.health.text,
        "utilization": _utilization(device),
        "memory": _memory(device),
        "line": _line(device),
        "who": _who(device, ours),
        "instances": [_instance(instance, ours) for instance in device.instances],
    }


def short_uuid(uuid: str) -> str:
    """Return the first part of a UUID.

    >>> short_uuid("MIG-41b36db5-0000-4000-8000-000000000001")
    'MIG-41b36db5'
    """
    return "-".join(uuid.split("-")[:2])


def absent(device: DeviceState, key: str) -> str:
    """Say why a value is not there."""
    why = device.missing.get(key, "no answer yet")
    if why in (NOT_BY_GPU, NOT_BY_DRIVER):
        return "n/a on this GPU" if why == NOT_BY_GPU else "n/a with this driver"
    return f"n/a on this GPU: {why}"


def of_total(used: float, total: float | None) -> str:
    """Return bytes of a total in the total's unit, with the percentage.

    >>> of_total(3 * 2**30, 80 * 2**30)
    '3.00 of 80.0 GiB (4 %)'
    """
    if not total:
        return format_bytes(used)
    whole, part = format_bytes(total), format_bytes(used)
    number, _, unit = part.partition(" ")
    part = number if whole.endswith(f" {unit}") else part
    return f"{part} of {whole} ({100 * used / total:.0f} %)"


def _utilization(device: DeviceState) -> Json:
    value = device.values.get("gpu/util")
    if value is not None:
        return {"share": value, "text": _percent(value)}
    return _no_share(
        device, "divided by MIG" if device.info.mig else device.missing.get("gpu/util")
    )


def _memory(device: DeviceState) -> Json:
    used = device.values.get("gpu/mem_used")
    total = device.values.get("gpu/mem_total", device.info.memory_total)
    if used is None:
        return _no_share(device, device.missing.get("gpu/mem_used"))
    return {"share": 100 * used / total if total else None, "text": of_total(used, total)}


def _no_share(device: DeviceState, why: str | None) -> Json:
    """Return a value that is missing; of a lost GPU the line of health says why."""
    return {"share": None, "text": "n/a" if device.lost or not why else f"n/a ({why})"}


def _line(device: DeviceState) -> list[str]:
    """Return temperature, power and clock, those that there are."""
    parts = []
    if "gpu/temp" in device.values:
        parts.append(f"{device.values['gpu/temp']:.0f} °C")
    if "gpu/power" in device.values:
        limit = device.values.get("gpu/power_limit")
        of = "" if limit is None else f" of {limit:.0f}"
        parts.append(f"{device.values['gpu/power']:.0f}{of} W")
    if "gpu/sm_clock" in device.values:
        parts.append(f"{device.values['gpu/sm_clock']:,.0f} MHz")
    return parts


def _who(device: DeviceState, ours: Mapping[int, str]) -> str:
    """Return in a line who is on the GPU, the largest first."""
    if device.lost is not None:
        return "Processes unknown."
    if device.instances:
        count = len(device.instances)
        return f"Divided into {count} MIG instance{'' if count == 1 else 's'}."
    if device.processes is None:
        return f"Processes n/a: {device.missing.get('processes', 'the driver does not tell')}"
    if not device.processes:
        return "No processes."
    largest = sorted(device.processes, key=lambda process: -(process.memory or 0))
    shown = [_briefly(process, ours) for process in largest[:2]]
    more = len(largest) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _briefly(process: GpuProcess, ours: Mapping[int, str]) -> str:
    memory = "" if process.memory is None else f" {format_bytes(process.memory)}"
    return f"{owner(process, ours)}: {process.name}{memory}"


def owner(process: GpuProcess, ours: Mapping[int, str]) -> str:
    """Return whose process it is: of a recorded run, of the same user, or another's."""
    if process.pid in ours:
        return f"run {ours[process.pid]}"
    return "you" if process.yours else process.user


def _instance(instance: DeviceState, ours: Mapping[int, str]) -> Json:
    return instance_name(instance) | {"memory": _memory(instance), "who": _who(instance, ours)}


def instance_name(instance: DeviceState) -> Json:
    """Return what a MIG instance is called."""
    return {
        "uuid": instance.info.uuid,
        "short": short_uuid(instance.info.uuid),
        "profile": getattr(instance.facts, "mig_profile", None) or instance.info.name,
    }


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} %"
