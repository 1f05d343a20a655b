"""`stepscope devices`: print every GPU of this host once, or refresh the table."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.cli import call_driver
from stepscope.cli.arguments import add_json, number_type
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import (
    DeviceState,
    HealthStatus,
    HostState,
    MachineState,
    machine_json,
)
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import open_source

EXAMPLES = (
    "stepscope devices",
    "stepscope devices --watch             repeats every second, until Ctrl-C",
    "stepscope devices --watch 5 --json    one JSON object a line",
    "stepscope devices --json | jq '.devices[].health'",
)
FIRST_WAIT_S = 0.3  # Pause between the first two samples, which give process loads and activity.
MIN_COLUMNS = 40
MAX_COMMAND = 100  # characters
CLEAR = "\x1b[H\x1b[2J"
INDENT = "   "
MARKS = {
    HealthStatus.OK: "ok",
    HealthStatus.NOTICE: "–",
    HealthStatus.WARNING: "!",
    HealthStatus.CRITICAL: "✗",
}
LINES = (
    {
        "gpu/util": "Utilization",
        "gpu/sm_active": "SM active",
        "gpu/tensor_active": "tensor active",
        "gpu/dram_active": "DRAM active",
    },
    {"gpu/mem_used": "Memory", "gpu/mem_total": "total"},
    {
        "gpu/temp": "Temperature",
        "gpu/temp_mem": "memory",
        "gpu/power": "power",
        "gpu/power_limit": "limit",
        "gpu/fan": "fan",
    },
    {
        "gpu/sm_clock": "SM clock",
        "gpu/mem_clock": "memory clock",
        "gpu/pcie_tx": "PCIe out",
        "gpu/pcie_rx": "PCIe in",
        "gpu/nvlink_tx": "NVLink out",
        "gpu/nvlink_rx": "NVLink in",
    },
)
"""The metrics of each line with their labels."""
ALWAYS = frozenset(("gpu/util", "gpu/mem_used", "gpu/temp", "gpu/power", "gpu/sm_clock"))
"""Metrics that are n/a with the reason if they are missing; the others are left out."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=number_type(0.2, 3600.0, float),
        const=1.0,
        metavar="SECONDS",
        help="repeat every SECONDS (default: 1) until Ctrl-C",
    )
    add_json(parser, "print JSON: one object, or one per line with --watch")


def run(options: argparse.Namespace, root: Path) -> int:
    """Show the devices. Ctrl-C raises KeyboardInterrupt, a silent driver CommandError."""
    show(MachineMonitor(open_source), watch_s=options.watch, as_json=options.json)
    return 0


def show(
    machine: MachineMonitor,
    *,
    watch_s: float | None = None,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print the devices once, or every `watch_s` seconds."""
    call_driver(machine.poll)
    sleep(FIRST_WAIT_S)
    while True:
        view = call_driver(machine.poll)
        if as_json:
            indent = 1 if watch_s is None else None
            print(json.dumps(machine_json(view), indent=indent), flush=True)
        else:
            clear = CLEAR if watch_s is not None and sys.stdout.isatty() else ""
            columns = shutil.get_terminal_size().columns
            print(clear + "\n".join(table(view, columns)), flush=True)
        if watch_s is None:
            return
        sleep(watch_s)


def table(view: MachineState, columns: int) -> Iterator[str]:
    """Yield the lines for a terminal of this width, without control characters."""
    count = len(view.devices)
    known = [view.host.name, f"{count} GPU{'' if count == 1 else 's'}"]
    for name in ("driver", "cuda", "torch"):
        version = getattr(view.host, name)
        known.append(f"{name} {version}" if version else f"no {name}")
    lines = [
        " · ".join([*known, time.strftime("%H:%M:%S", time.localtime(view.ts))]),
        _load(view.host),
    ]
    if view.reason is not None:
        lines += ["", view.reason]
    for device in view.devices:
        lines += ["", *_device(device)]
    if any(process.yours for device in view.devices for process in device.processes or ()):
        lines += ["", "* your process"]
    for line in map(printable, lines):
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, max(MIN_COLUMNS, columns), subsequent_indent=indent) or [""]


def _load(host: HostState) -> str:
    cpu = "n/a" if host.cpu_percent is None else f"{host.cpu_percent:.0f}%"
    memory = f"{format_bytes(host.memory_used)} of {format_bytes(host.memory_total)}"
    return f"CPU {cpu} of {host.cores or '?'} cores · memory {memory} · {host.cpu}"


def _device(device: DeviceState) -> Iterator[str]:
    bus = "" if device.facts is None else device.facts.pci_bus_id or ""
    yield f"{device.info.nvml_index}  {device.info.name}  {device.info.short_uuid}  {bus}".rstrip()
    for line in LINES:
        yield INDENT + _values(device, line)
    others = [issue.text for issue in device.health.issues if issue.text not in device.health.text]
    yield f"{INDENT}{MARKS[device.health.level]} {' '.join((device.health.text, *others))}"
    for instance in device.instances:
        memory = _values(instance, LINES[1])
        name = instance.info.mig_profile or instance.info.name
        yield f"{INDENT}MIG {name} · {instance.info.short_uuid} · {memory}"
        yield from _processes(instance, 2 * INDENT)
    yield from _processes(device, INDENT)


def _values(device: DeviceState, line: dict[str, str]) -> str:
    """Return the labels and values of a line; a missing value is its reason."""
    parts = []
    for key, label in line.items():
        value = device.values.get(key)
        if value is not None:
            parts.append(f"{label} {_value(value, BY_KEY[key].unit)}")
        elif key in ALWAYS:
            parts.append(f"{label} n/a ({device.missing.get(key, 'no answer yet')})")
    return " · ".join(parts)


def _value(value: float, unit: Unit) -> str:
    if unit is Unit.PERCENT:
        return f"{value:.0f}%"
    if unit is Unit.BYTES:
        return format_bytes(value)
    if unit is Unit.BYTES_PER_SECOND:
        return f"{format_bytes(value)}/s"
    return f"{value:.0f} {unit.value}"


def _processes(device: DeviceState, indent: str) -> Iterator[str]:
    processes = device.own_processes
    if processes is None:
        reason = device.missing.get("processes", "the driver gives no reason")
        yield f"{indent}Processes n/a ({reason})"
    elif not processes and not device.instances:
        yield f"{indent}No process uses it."
    for process in processes or ():
        yield f"{indent}{_process(process)}"


def _process(process: GpuProcess) -> str:
    memory = "n/a" if process.memory is None else format_bytes(process.memory)
    state = "" if process.state == "running" else f"[{process.state}] "
    command = process.command or process.name
    who = f"{'*' if process.yours else ' '}{process.pid:>8} {process.user or '?':<10}"
    return f"{who} {memory:>9}  {state}{command[:MAX_COMMAND]}"
