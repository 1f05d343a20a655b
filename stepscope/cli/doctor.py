"""`stepscope doctor`: what was found on this machine, what is missing, and why.

`findings` is pure: it judges a `Machine`. "broken" is what should work and does not; "missing" is
what is not there, as a GPU on many machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.cli.survey import AlertsFile, Gpu, Machine, survey
from stepscope.common.formatting import format_bytes

TORCH_TESTED = ((2, 11), (2, 15))
"""Oldest and newest version of torch that `watch`, `init` and the hooks are tested with."""
GET_TORCH = "Install a CUDA build for this driver: https://pytorch.org/get-started."
LOW_SPACE = 2**30
SMALL_SHARED_MEMORY = 2**30

EXAMPLES = ("stepscope doctor", "stepscope doctor --json")


class Mark(StrEnum):
    """How a part stands."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


_SIGNS = {Mark.OK: "ok", Mark.MISSING: "–", Mark.BROKEN: "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is a sentence, or empty."""

    mark: Mark
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_SIGNS[self.mark]:<4}{self.what}: {self.detail.rstrip('.')}."
        return f"{line} {self.remedy}" if self.remedy else line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.add_argument("--json", action="store_true", help="findings and facts as JSON")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the report; return 1 where something that should work does not."""
    machine = survey(root)
    found = list(findings(machine))
    broken = sum(finding.mark is Mark.BROKEN for finding in found)
    if options.json:
        report = {
            "ok": not broken,
            "findings": [dataclasses.asdict(one) for one in found],
            "facts": dataclasses.asdict(machine),
        }
        print(json.dumps(report, indent=1))
    else:
        print(*found, "", sep="\n")
        does = "thing does" if broken == 1 else "things do"
        print(f"{broken} {does} not work; see ✗ above." if broken else "Recording works here.")
    return 1 if broken else 0


def findings(machine: Machine) -> Iterator[Finding]:
    """Judge the machine, one part after another."""
    yield Finding(Mark.OK, "Python", f"{machine.python} ({machine.executable})")
    yield Finding(Mark.OK, "stepscope", machine.version)
    yield _run_folder(machine)
    yield Finding(Mark.OK, "SQLite", machine.sqlite)
    yield _driver(machine)
    for gpu in machine.gpus:
        yield _gpu(gpu)
    yield from _torch(machine)
    if machine.visible_devices is not None:
        detail = f"{machine.visible_devices!r}: torch sees these only; Stepscope lists every GPU"
        yield Finding(Mark.OK, "CUDA_VISIBLE_DEVICES", detail)
    yield from _limits(machine)
    yield from _alerts(machine.alerts)
    if machine.page is None:
        versions = ", ".join(f"{name} {machine.packages[name]}" for name in ("streamlit", "plotly"))
        yield Finding(Mark.OK, "page", f"'stepscope ui' opens it ({versions})")
    else:
        yield Finding(Mark.MISSING, "page", machine.page)
    for package, name in (("pyarrow", "parquet"), ("tensorboard", "tensorboard")):
        version, what = machine.packages[package], f"export to {name}"
        if version is not None:
            yield Finding(Mark.OK, what, f"{package} {version}")
        else:
            remedy = f"Run 'pip install {package}'."
            yield Finding(Mark.MISSING, what, f"{package} is not installed", remedy)


def _run_folder(machine: Machine) -> Finding:
    if machine.recording_error is not None:
        detail = f"{machine.runs} cannot hold a run: {machine.recording_error}"
        remedy = "Set STEPSCOPE_RUNS to a folder that can be written."
        return Finding(Mark.BROKEN, "run folder", detail, remedy)
    detail = f"{machine.runs}, {format_bytes(machine.free)} free"
    if machine.free is not None and machine.free < LOW_SPACE:
        remedy = "A run takes some 200 MB a day; free disk space, or set STEPSCOPE_RUNS."
        return Finding(Mark.BROKEN, "run folder", detail, remedy)
    return Finding(Mark.OK, "run folder", detail)


def _driver(machine: Machine) -> Finding:
    if machine.nvml_reason is None:
        detail = f"driver {machine.driver}, {_count(len(machine.gpus))}"
        return Finding(Mark.OK, "NVIDIA driver", detail)
    detail = machine.nvml_reason
    if machine.device_nodes:
        detail += " Yet /dev/nvidiactl is there"
    elif machine.torch and machine.torch.get("available"):
        detail += " Yet torch sees a GPU"
    elif not machine.nvml_broken:
        return Finding(Mark.MISSING, "NVIDIA driver", detail, "No GPU values then.")
    remedy = "Check that nvidia-smi works here; utilization, power and temperature are missing."
    return Finding(Mark.BROKEN, "NVIDIA driver", detail, remedy)


def _gpu(gpu: Gpu) -> Finding:
    what = f"GPU {gpu.nvml_index}"
    if gpu.lost is not None:
        remedy = "Look for 'Xid' in dmesg; the GPU may need a reset."
        return Finding(Mark.BROKEN, what, f"{gpu.name}, {gpu.uuid}: {gpu.lost}", remedy)
    size = format_bytes(gpu.memory_total)
    detail = f"{gpu.name}, {size}, {gpu.uuid}, {gpu.read} metrics"
    if gpu.mig:
        detail += "; MIG is on, so its utilization is not given"
    missing = [f"{key} ({reason})" for key, reason in gpu.missing.items()]
    if missing:
        detail += f"; without {', '.join(missing)}"
    rights = "permission" in gpu.missing.values()
    remedy = "Ask the administrator to let users read the GPU's counters." if rights else ""
    return Finding(Mark.OK if gpu.read else Mark.BROKEN, what, detail, remedy)


def _torch(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if torch is None:
        remedy = "'stepscope record' works without it; a training script needs it."
        yield Finding(Mark.MISSING, "torch", "not installed in this environment", remedy)
        return
    detail = torch["version"]
    if "error" in torch:
        detail += f" cannot be imported: {torch['error']}"
        yield Finding(Mark.BROKEN, "torch", detail, "Install it again.")
    elif torch["cuda"] is None:
        mark = Mark.BROKEN if machine.gpus else Mark.OK
        remedy = GET_TORCH if machine.gpus else ""
        yield Finding(mark, "torch", f"{detail}, a build without CUDA", remedy)
    else:
        yield _torch_devices(machine, torch, f"{detail}, built for CUDA {torch['cuda']}")
    found = re.match(r"(\d+)\.(\d+)", torch["version"])
    oldest, newest = TORCH_TESTED
    if found and not oldest <= (int(found[1]), int(found[2])) <= newest:
        tested = " to ".join(f"{major}.{minor}" for major, minor in TORCH_TESTED)
        detail = f"{found[0]}; Stepscope is tested with {tested}"
        remedy = "Training is not changed; stderr says which values cannot be recorded."
        yield Finding(Mark.MISSING, "torch's version", detail, remedy)


def _torch_devices(machine: Machine, torch: dict[str, Any], built: str) -> Finding:
    """Compare what a CUDA build of torch sees with what the driver has."""
    have, visible = len(machine.gpus), machine.visible_devices
    if torch["available"]:
        seen = len(torch["devices"])
        return Finding(Mark.OK, "torch", f"{built}; sees {seen} of {_count(max(seen, have))}")
    if not have:
        return Finding(Mark.MISSING, "torch", f"{built}; there is no GPU for it here")
    if visible is not None and visible.strip() in ("", "-1"):
        detail = f"{built}; CUDA_VISIBLE_DEVICES hides every GPU from it"
        return Finding(Mark.MISSING, "torch", detail, "Unset it to train on a GPU.")
    detail = f"{built}, does not see the GPU: {next(iter(torch['warnings']), 'it gives no reason')}"
    return Finding(Mark.BROKEN, "torch", detail, GET_TORCH)


def _limits(machine: Machine) -> Iterator[Finding]:
    memory, cpus = machine.memory_limit, machine.cpu_limit
    limits = [f"{format_bytes(memory)} of memory"] if memory is not None else []
    limits += [f"{cpus:g} CPUs"] if cpus is not None else []
    if limits:
        detail = f"limited to {' and '.join(limits)}; host/cpu is that of the whole host"
        yield Finding(Mark.OK, "container", detail)
    if machine.shared_memory is not None and machine.shared_memory < SMALL_SHARED_MEMORY:
        detail = f"only {format_bytes(machine.shared_memory)}: DataLoader workers need more"
        remedy = "In a container, start it with --shm-size=8g."
        yield Finding(Mark.MISSING, "/dev/shm", detail, remedy)


def _alerts(file: AlertsFile) -> Iterator[Finding]:
    if file.path is None:
        yield Finding(Mark.OK, "alerts", "switched off by STEPSCOPE_ALERTS")
        return
    tells = [f"the command {file.command}"] if file.command else []
    tells += [f"the webhook {file.webhook}"] if file.webhook else []
    where = file.path if file.found else f"no file {file.path}"
    told = f"told to {' and '.join(tells)}" if tells else "shown on the page only"
    yield Finding(Mark.OK, "alerts", f"{where}; {file.rules} rules, {told}")
    for problem in file.problems:
        yield Finding(Mark.BROKEN, "alerts", problem)


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"
