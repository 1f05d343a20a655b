"""`stepscope doctor`: check this host, and print missing and broken parts with their reasons.

"Broken" parts should work and do not; "missing" parts are optional, such as a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.alerts.settings import load
from stepscope.cli import CommandError, call_driver
from stepscope.cli.app_process import PAGE, missing
from stepscope.cli.arguments import add_json
from stepscope.common.formatting import format_bytes
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import DeviceState, MachineState
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.host.environment import SUPPORTED, installed_torch, unsupported
from stepscope.run import RunStatus
from stepscope.store import StoreError, StoreReader
from stepscope.store.recorder import Recorder

BETWEEN_S = 0.15  # Between samples: rates need two, and a sleeping GPU may not answer the first.
TORCH_TIMEOUT_S = 120.0  # `import torch` from a cold network disk can take a minute
MIN_FREE_BYTES = 2**30
MIN_SHARED_MEMORY_BYTES = 2**30
GET_TORCH = "Install a CUDA build for this driver: https://pytorch.org/get-started."
EXAMPLES = ("stepscope doctor", "stepscope doctor --json")

_IMPORT_TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "devices": devices,
    "warnings": [str(one.message).split(" (Triggered")[0] for one in caught],
}))
"""


class CheckStatus(StrEnum):
    """Status of a part."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


OK, MISSING, BROKEN = CheckStatus
_MARKS = {OK: "ok", MISSING: "–", BROKEN: "✗"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Line of the report; `remedy` is a sentence, or empty."""

    mark: CheckStatus
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_MARKS[self.mark]:<4}{self.what}: {self.detail.rstrip('.')}."
        return f"{line} {self.remedy}" if self.remedy else line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_json(parser, "print the findings as JSON")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the report; return 1 if any part is broken. Takes as long as `import torch`."""
    results = list(findings(root))
    broken = sum(finding.mark is BROKEN for finding in results)
    if options.json:
        report = {"ok": not broken, "findings": [asdict(finding) for finding in results]}
        print(json.dumps(report, indent=1))
    else:
        print(*results, "", sep="\n")
        does = "thing does" if broken == 1 else "things do"
        print(f"{broken} {does} not work; see ✗ above." if broken else "Recording works here.")
    return 1 if broken else 0


def findings(root: Path) -> Iterator[CheckResult]:
    """Measure all parts of this host; yield the status of each."""
    torch = import_torch()
    gpus = check_gpus(open_source, has_cuda=bool(torch and torch.get("devices")))
    yield CheckResult(OK, "Python", f"{platform.python_version()} ({sys.executable})")
    yield CheckResult(OK, "stepscope", __version__)
    yield check_run_folder(root)
    yield from gpus
    yield from check_torch(torch, gpus=len(gpus) - 1)
    shared_memory = Path("/dev/shm")
    size = shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else math.inf
    if size < MIN_SHARED_MEMORY_BYTES:
        detail = f"only {format_bytes(size)}: DataLoader workers need more"
        remedy = "In a container, start it with --shm-size=8g."
        yield CheckResult(MISSING, str(shared_memory), detail, remedy)
    yield check_alerts()
    page = missing(PAGE)
    yield CheckResult(OK if page is None else MISSING, "page", page or "'stepscope ui' opens it")


def check_run_folder(root: Path) -> CheckResult:
    """Record and read one row in a temporary folder near `root`, and check the free space."""
    root = root.resolve()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as folder:
            recorder = Recorder(Path(folder), name="doctor")
            recorder.log(1, {"train/loss": 1.0})
            recorder.close(RunStatus.FINISHED)
            with StoreReader(Path(folder)) as reader:
                if [series.rows for series in reader.series()] != [1]:
                    raise StoreError("a row that was recorded could not be read")
        free = shutil.disk_usage(existing).free
    except (OSError, StoreError) as error:
        detail = f"{root} cannot hold a run: {getattr(error, 'strerror', None) or error}"
        remedy = "Set STEPSCOPE_RUNS to a writable folder."
        return CheckResult(BROKEN, "run folder", detail, remedy)
    detail = f"{root}, {format_bytes(free)} free"
    if free < MIN_FREE_BYTES:
        remedy = "A run takes about 200 MB per day; free disk space or set STEPSCOPE_RUNS."
        return CheckResult(BROKEN, "run folder", detail, remedy)
    return CheckResult(OK, "run folder", detail)


def check_gpus(open_nvml: Callable[[], DeviceSource], *, has_cuda: bool) -> list[CheckResult]:
    """Return the status of the driver, then of each GPU; `has_cuda`: torch found a GPU."""
    machine = MachineMonitor(open_nvml)

    def read() -> MachineState:
        machine.poll()
        time.sleep(BETWEEN_S)
        return machine.poll()

    what = "NVIDIA driver"
    try:
        view = call_driver(read)
        reason = view.reason
        if reason is None:
            detail = f"driver {view.host.driver}, {_count(len(view.devices))}"
            return [CheckResult(OK, what, detail), *map(_check_gpu, view.devices)]
    except CommandError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - the other checks still apply
        reason = f"NVML failed: {type(error).__name__}: {str(error)[:100]}."
    if Path("/dev/nvidiactl").exists():
        reason += " But /dev/nvidiactl exists"
    elif has_cuda:
        reason += " Yet torch sees a GPU"
    elif machine.source is not None and math.isfinite(machine.source.retry_at):
        return [CheckResult(MISSING, what, reason, "GPU values are missing.")]
    remedy = "Check that nvidia-smi works; utilization, power and temperature are missing."
    return [CheckResult(BROKEN, what, reason, remedy)]


def _check_gpu(device: DeviceState) -> CheckResult:
    info, values = device.info, device.values
    what = f"GPU {info.nvml_index}"
    if device.lost is not None:
        remedy = "Look for 'Xid' in dmesg; the GPU may need a reset."
        return CheckResult(BROKEN, what, f"{info.name}, {info.uuid}: {device.lost}", remedy)
    size = format_bytes(info.memory_total)
    detail = f"{info.name}, {size}, {info.uuid}, {len(values)} metrics"
    if info.mig:
        detail += "; MIG is on, so its utilization is not given"
    reasons = {key: reason for key, reason in device.missing.items() if key != "xid"}
    if reasons:
        texts = (f"{key} ({reason})" for key, reason in reasons.items())
        detail += f"; without {', '.join(texts)}"
    remedy = ""
    if "permission" in reasons.values():
        remedy = "Ask the administrator to let users read the GPU's counters."
    return CheckResult(OK if values else BROKEN, what, detail, remedy)


def import_torch(python: str = sys.executable) -> dict[str, Any] | None:
    """Import torch in a child process and return its properties; None if not installed.

    `version` and `error`, or `version`, `cuda` (None without), `devices` (number), `warnings`.
    """
    version = installed_torch()
    if version is None:
        return None
    command = [python, "-c", _IMPORT_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"version": version, "error": f"no answer within {TORCH_TIMEOUT_S:g} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"version": version, "error": lines[-1]}


def check_torch(torch: dict[str, Any] | None, *, gpus: int) -> Iterator[CheckResult]:
    """Yield the status of torch, as returned by `import_torch`, on a host with so many GPUs."""
    if torch is None:
        remedy = "Recorded runs open without it; a training script needs it."
        yield CheckResult(MISSING, "torch", "not installed in this environment", remedy)
        return
    yield _check_cuda(torch, gpus)
    problem = unsupported(torch["version"])
    if problem is not None:
        yield CheckResult(MISSING, "torch version", problem, f"Install torch {SUPPORTED}.")


def _check_cuda(torch: dict[str, Any], gpus: int) -> CheckResult:
    version = torch["version"]
    if "error" in torch:
        detail = f"{version} cannot be imported: {torch['error']}"
        return CheckResult(BROKEN, "torch", detail, "Install it again.")
    if torch["cuda"] is None:
        detail = f"{version}, a build without CUDA"
        if gpus:
            return CheckResult(BROKEN, "torch", detail, GET_TORCH)
        return CheckResult(OK, "torch", detail)
    built = f"{version}, built for CUDA {torch['cuda']}"
    found = torch["devices"]
    if found:
        return CheckResult(OK, "torch", f"{built}; sees {found} of {_count(max(found, gpus))}")
    if not gpus:
        return CheckResult(MISSING, "torch", f"{built}; there is no GPU for it here")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        detail = f"{built}; CUDA_VISIBLE_DEVICES hides every GPU from it"
        return CheckResult(MISSING, "torch", detail, "Unset it to train on a GPU.")
    why = next(iter(torch["warnings"]), "it gives no reason")
    return CheckResult(BROKEN, "torch", f"{built}, does not see the GPU: {why}", GET_TORCH)


def check_alerts() -> CheckResult:
    """Return the status of alerts.toml."""
    settings = load()
    if settings.problem is not None:
        return CheckResult(BROKEN, "alerts", settings.problem)
    return CheckResult(OK, "alerts", str(settings.path or "switched off by STEPSCOPE_ALERTS"))


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"
