"""`stepscope devices`: print every GPU of this host once, or refresh the table."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from stepscope.cli import call_driver, number_type
from stepscope.common.formatting import format_bytes, printable
from stepscope.gpu.device_events import REASONS, throttle_text
from stepscope.gpu.health import HealthStatus, link
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState, machine_json
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import open_source

MIN_COLUMNS = 40
BAR_COLUMNS = 24
MIN_WINDOW_S = 5.0  # Of throttling times; a shorter one shows those since the driver was loaded.
INDENT = "   "
MARKS = {
    HealthStatus.OK: "ok",
    HealthStatus.NOTICE: "–",
    HealthStatus.WARNING: "!",
    HealthStatus.CRITICAL: "✗",
}
SEPARATOR = " · "


def table(view: MachineState, columns: int) -> list[str]:
    """Return the lines for a terminal of this width."""
    width = max(MIN_COLUMNS, columns)
    lines = [*wrapped(_machine(view), width), *wrapped(_load(view.host), width)]
    if view.reason is not None:
        return [*lines, "", *wrapped([*view.reason.split(" ")], width, separator=" ")]
    for device in view.devices:
        lines += ["", *block(device, width)]
    if any(process.yours for device in view.devices for process in device.processes or ()):
        lines += ["", "* your process"]
    return lines


def block(device: DeviceState, width: int) -> list[str]:
    """Return the lines of one GPU."""
    lines = [_head(device, width)]
    for parts in (_activity(device), _memory(device), _heat(device), _clocks(device)):
        lines += wrapped(parts, width, INDENT)
    text = throttle_text(device.throttled, device.throttle_window_s)
    if device.throttle_window_s < MIN_WINDOW_S:
        total = {key: device.values[key] for key in REASONS if key in device.values}
        text = throttle_text(total, None)
    lines += wrapped(f"Clocks {text[:1].lower()}{text[1:]}".split(" "), width, INDENT, " ")
    lines += _health(device, width)
    for instance in device.instances:
        lines += _instance(instance, width)
    return [*lines, *_processes(device, width, INDENT)]


def wrapped(
    parts: Iterable[str], width: int, indent: str = "", separator: str = SEPARATOR
) -> list[str]:
    """Join parts into lines of at most `width` characters; longer parts are cut."""
    lines: list[str] = []
    line = ""
    for part in map(printable, parts):
        longer = f"{line}{separator}{part}" if line else f"{indent}{part}"
        if line and len(longer) > width:
            lines.append(line)
            longer = f"{indent}{part}"
        line = cut(longer, width)
    return [*lines, line] if line else lines


def cut(text: str, width: int) -> str:
    """Return the text, cut to `width` characters.

    >>> cut("python train.py", 8)
    'python …'
    """
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _machine(view: MachineState) -> list[str]:
    host, count = view.host, len(view.devices)
    parts = [host.name, f"{count} GPU{'' if count == 1 else 's'}"]
    parts += [f"driver {host.driver}"] if host.driver else []
    parts += [f"CUDA {host.cuda}"] if host.cuda else []
    parts += [f"torch {host.torch}"] if host.torch else ["torch is not installed here"]
    return [*parts, time.strftime("%H:%M:%S", time.localtime(view.ts))]


def _load(host: HostState) -> list[str]:
    cpu = "n/a" if host.cpu_percent is None else f"{host.cpu_percent:.0f}%"
    return [
        f"CPU {cpu} of {host.cores or '?'} cores",
        f"memory {_of(host.memory_used, host.memory_total)}",
        host.cpu,
    ]


def _head(device: DeviceState, width: int) -> str:
    left = f"{device.info.nvml_index}  {printable(device.info.name)}"
    right = device.info.short_uuid
    if device.facts is not None and device.facts.pci_bus_id:
        right += f"  {printable(device.facts.pci_bus_id)}"
    left_width = width - len(right) - 2
    if left_width <= 12:
        return cut(left, width)
    return f"{cut(left, left_width):<{left_width}}  {right}"


def _value(device: DeviceState, key: str, text: str = "{:.0f}", label: str = "") -> str:
    """Return a value as text, or the reason why it is missing."""
    value = device.values.get(key)
    before = f"{label} " if label else ""
    if value is not None:
        return before + text.format(value)
    return f"{before}n/a ({device.missing.get(key, 'no answer yet')})"


def _activity(device: DeviceState) -> Iterator[str]:
    bar = _bar(device.values.get("gpu/util"))
    yield _value(device, "gpu/util", "{:.0f}%", "Utilization") + bar
    units = {"gpu/sm_active": "SM", "gpu/tensor_active": "tensor", "gpu/dram_active": "DRAM"}
    values = device.values
    active = [f"{unit} {values[key]:.0f}%" for key, unit in units.items() if key in values]
    if active:
        yield f"active: {', '.join(active)}"


def _memory(device: DeviceState) -> Iterator[str]:
    used, total = device.values.get("gpu/mem_used"), device.values.get("gpu/mem_total")
    total = total if total is not None else device.info.memory_total
    if used is None:
        yield _value(device, "gpu/mem_used", label="Memory")
    else:
        yield f"Memory {_of(used, total)}{_bar(100 * used / total if total else None)}"


def _bar(percent: float | None) -> str:
    """Return a bar; "" for None."""
    if percent is None:
        return ""
    full = round(min(100.0, max(0.0, percent)) / 100 * BAR_COLUMNS)
    return f"  {'█' * full}{'░' * (BAR_COLUMNS - full)}"


def _heat(device: DeviceState) -> Iterator[str]:
    thresholds = []
    if device.facts is not None and device.facts.temp_slowdown is not None:
        thresholds.append(f"slows down at {device.facts.temp_slowdown:.0f}")
    if device.facts is not None and device.facts.temp_shutdown is not None:
        thresholds.append(f"off at {device.facts.temp_shutdown:.0f}")
    after = f" ({', '.join(thresholds)})" if thresholds else ""
    yield _value(device, "gpu/temp", "{:.0f} °C", "Temperature") + after
    if "gpu/temp_mem" in device.values:
        yield f"memory {device.values['gpu/temp_mem']:.0f} °C"
    limit = device.values.get("gpu/power_limit")
    of = "" if limit is None else f" of {limit:.0f} W"
    yield _value(device, "gpu/power", "{:.0f} W" if limit is None else "{:.0f}", "power") + of
    if "gpu/fan" in device.values:
        yield f"fan {device.values['gpu/fan']:.0f}%"


def _clocks(device: DeviceState) -> Iterator[str]:
    facts = device.facts
    most = facts.max_sm_clock if facts is not None else None
    of = "" if most is None else f" of {most:.0f}"
    yield _value(device, "gpu/sm_clock", "{:.0f}" + of + " MHz", "SM clock")
    if "gpu/mem_clock" in device.values:
        yield f"memory clock {device.values['gpu/mem_clock']:.0f} MHz"
    if facts is not None and facts.pcie_gen is not None:
        yield f"PCIe {link(facts.pcie_gen, facts.pcie_width)}"
    for name, key in (("PCIe", "gpu/pcie"), ("NVLink", "gpu/nvlink")):
        sent, received = device.values.get(f"{key}_tx"), device.values.get(f"{key}_rx")
        if sent is not None and received is not None:
            yield f"{name} out {format_bytes(sent)}/s in {format_bytes(received)}/s"


def _health(device: DeviceState, width: int) -> list[str]:
    others = [issue.text for issue in device.health.issues if issue.text not in device.health.text]
    lines = []
    for text in (device.health.text, *others):
        lines += wrapped(text.split(" "), width - 6, separator=" ")
    mark = MARKS[device.health.level]
    return [f"{INDENT}{'' if at else mark:<3}{line}" for at, line in enumerate(lines)]


def _instance(instance: DeviceState, width: int) -> list[str]:
    facts = instance.facts
    profile = facts.mig_profile if facts is not None and facts.mig_profile else instance.info.name
    lines = wrapped([f"MIG {profile}", instance.info.short_uuid, *_memory(instance)], width, INDENT)
    return [*lines, *_processes(instance, width, 2 * INDENT)]


def _processes(device: DeviceState, width: int, indent: str) -> list[str]:
    processes = device.own_processes
    if processes is None:
        reason = device.missing.get("processes", "the driver gives no reason")
        return wrapped([f"Processes n/a ({reason})"], width, indent)
    if not processes and not device.instances:
        return [f"{indent}No process uses it."]
    return [_process(process, width, indent) for process in processes]


def _process(process: GpuProcess, width: int, indent: str) -> str:
    memory = "n/a" if process.memory is None else format_bytes(process.memory)
    load = "" if process.sm is None else f"{process.sm:.0f}%"
    state = "" if process.state == "running" else f"[{process.state}] "
    who = f"{'*' if process.yours else ' '}{process.pid:>8} {cut(process.user or '?', 10):<10}"
    program, space, rest = process.command.partition(" ")
    name = f"{program.rpartition('/')[2]}{space}{rest}" or process.name
    return cut(printable(f"{indent}{who} {memory:>9} {load:>5}  {state}{name}"), width)


def _of(used: float, total: float | None) -> str:
    """Return bytes of a total, with the percentage."""
    if not total:
        return format_bytes(used)
    return f"{format_bytes(used)} of {format_bytes(total)} ({100 * used / total:.0f}%)"


EXAMPLES = (
    "stepscope devices",
    "stepscope devices --watch             again every second, until Ctrl-C",
    "stepscope devices --watch 5 --json    one JSON object a line",
    "stepscope devices --json | jq '.devices[].health'",
)

FIRST_WAIT_S = 0.3  # Pause between the first two samples, which give process loads and activity.
SILENT_S = 15.0  # Timeout of a driver call.
END_S = 1.0  # Timeout of the call that disables the activity counters.

HOME = "\x1b[H"
CLEAR = "\x1b[2J"
CLEAR_LINE = "\x1b[K"
CLEAR_BELOW = "\x1b[J"


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
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object, or one per line with --watch"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Show the devices; return the exit code. Ctrl-C raises KeyboardInterrupt."""
    return show(MachineMonitor(open_source), watch_s=options.watch, as_json=options.json)


def show(
    machine: MachineMonitor,
    *,
    watch_s: float | None = None,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the devices once, or every `watch_s` seconds; return 1 if the driver is silent."""
    write = _writer(watch_s is not None, as_json)
    try:
        call_driver(lambda: machine.arm(True), SILENT_S)
        try:
            call_driver(machine.poll, SILENT_S)
            sleep(FIRST_WAIT_S)
            while True:
                write(call_driver(machine.poll, SILENT_S))
                if watch_s is None:
                    return 0
                sleep(watch_s)
        finally:
            with suppress(TimeoutError):
                call_driver(lambda: machine.arm(False), END_S)
    except TimeoutError:
        print(f"The NVIDIA driver did not answer within {SILENT_S:g} s.", file=sys.stderr)
        return 1


def _writer(again: bool, as_json: bool) -> Callable[[MachineState], None]:
    """Return a function that prints a state as JSON, in place, or below the previous one."""
    if as_json:
        indent = None if again else 1
        return lambda view: print(json.dumps(machine_json(view), indent=indent), flush=True)
    if again and sys.stdout.isatty():
        print(CLEAR, end="")
        return lambda view: print(in_place(view), end="", flush=True)
    end = "\n\n" if again else "\n"
    return lambda view: print(
        "\n".join(table(view, shutil.get_terminal_size().columns)), end=end, flush=True
    )


def in_place(view: MachineState) -> str:
    """Return the terminal sequence that redraws the table, cut to the lines of the terminal."""
    size = shutil.get_terminal_size()
    lines = table(view, size.columns)
    if len(lines) >= size.lines:
        note = "Enlarge the window or use --json to see everything."
        lines = [*lines[: max(0, size.lines - 2)], note[: size.columns]]
    return HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW
