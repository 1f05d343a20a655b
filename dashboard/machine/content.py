"""The GPUs and the host on the Hardware page, as JSON of finished texts. No I/O.

The browser inserts every text as text, never as HTML: names and commands are untrusted.
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
    "containers with --gpus all. The command 'stepscope doctor' lists what is missing."
)


def machine_content(view: MachineState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    """Return the page without the details of a GPU.

    `cuda` maps the UUID of each GPU that this server can train on to torch's index, `ours` the pid
    of each recorded run to its name.
    """
    return {
        "host": host_content(view.host),
        "none": None if view.reason is None else {"reason": view.reason, "next": NO_GPU},
        "cards": [card(device, cuda, ours) for device in view.devices],
    }


def host_content(host: HostState) -> Json:
    """Return the card of the host."""
    share = 100 * host.memory_used / host.memory_total if host.memory_total else None
    return {
        "name": host.name,
        "cpu": {"share": host.cpu_percent, "text": _percent(host.cpu_percent)},
        "memory": {"share": share, "text": of_total(host.memory_used, host.memory_total)},
        "facts": [
            ["Processor", f"{host.cpu}, {host.cores or '?'} cores"],
            ["Driver", host.driver or "none"],
            ["CUDA of the driver", host.cuda or "none"],
            ["PyTorch", host.torch or "not installed"],
            ["Python", host.python],
            ["System", host.platform],
        ],
    }


def card(device: DeviceState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    """Return the card of one GPU."""
    index = cuda.get(device.info.uuid)
    return {
        "uuid": device.info.uuid,
        "title": f"GPU {device.info.nvml_index}",
        "cuda": None if index is None else f"cuda:{index}",
        "name": device.info.name,
        "short": device.info.short_uuid,
        "level": device.health.level.value,
        "health": device.health.text,
        "utilization": _utilization(device),
        "memory": _memory(device),
        "line": _line(device),
        "who": _who(device, ours),
        "instances": [_instance(instance, ours) for instance in device.instances],
    }


def absent(device: DeviceState, key: str) -> str:
    """Return why a value is missing."""
    why = device.missing.get(key, "no answer yet")
    if why in (NOT_BY_GPU, NOT_BY_DRIVER):
        return "n/a on this GPU" if why == NOT_BY_GPU else "n/a with this driver"
    return f"n/a on this GPU: {why}"


def of_total(used: float, total: float | None) -> str:
    """Return used bytes in the unit of the total, with the percentage.

    >>> of_total(3 * 2**30, 80 * 2**30)
    '3.00 of 80.0 GiB (4%)'
    """
    if not total:
        return format_bytes(used)
    whole, part = format_bytes(total), format_bytes(used)
    number, _, unit = part.partition(" ")
    part = number if whole.endswith(f" {unit}") else part
    return f"{part} of {whole} ({100 * used / total:.0f}%)"


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
    """Return a missing value with its reason; the health line has that of a lost GPU."""
    return {"share": None, "text": "n/a" if device.lost or not why else f"n/a ({why})"}


def _line(device: DeviceState) -> list[str]:
    """Return temperature, power and clock where they are known."""
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
    """Return the processes of the GPU in one line: recorded runs first, then the largest."""
    if device.lost is not None:
        return "Processes unknown."
    if device.instances:
        count = len(device.instances)
        return f"Divided into {count} MIG instance{'' if count == 1 else 's'}."
    if device.processes is None:
        return f"Processes n/a: {device.missing.get('processes', 'not reported by the driver')}"
    if not device.processes:
        return "No processes."
    order = sorted(device.processes, key=lambda one: (one.pid not in ours, -(one.memory or 0)))
    shown = [_briefly(process, ours) for process in order[:2]]
    more = len(order) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _briefly(process: GpuProcess, ours: Mapping[int, str]) -> str:
    memory = "" if process.memory is None else f" {format_bytes(process.memory)}"
    return f"{owner(process, ours)}: {process.name}{memory}"


def owner(process: GpuProcess, ours: Mapping[int, str]) -> str:
    """Return the owner of a process: a recorded run, "you", or another user."""
    if process.pid in ours:
        return f"run {ours[process.pid]}"
    return "you" if process.yours else process.user


def _instance(instance: DeviceState, ours: Mapping[int, str]) -> Json:
    return instance_name(instance) | {"memory": _memory(instance), "who": _who(instance, ours)}


def instance_name(instance: DeviceState) -> Json:
    """Return the identity of a MIG instance."""
    return {
        "uuid": instance.info.uuid,
        "short": instance.info.short_uuid,
        "profile": getattr(instance.facts, "mig_profile", None) or instance.info.name,
    }


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}%"
