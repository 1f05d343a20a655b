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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.alerts.settings import load
from stepscope.cli import call_driver
from stepscope.cli.app_process import PAGE, missing
from stepscope.common.formatting import format_bytes
from stepscope.gpu.device_info import DeviceInfo
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.host.environment import SUPPORTED, installed_torch, unsupported
from stepscope.run import RunKind, RunStatus
from stepscope.store import StoreError, StoreReader
from stepscope.store.recorder import Recorder

NVML_TIMEOUT_S = 15.0
BETWEEN_S = 0.15  # Between samples: rates need two, and a sleeping GPU may not answer the first.
TORCH_TIMEOUT_S = 120.0  # `import torch` from a cold network disk can take a minute

_ASK_TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    available = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": available,
    "devices": names, "warnings": [str(one.message).split(" (Triggered")[0] for one in caught],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProbe(DeviceInfo):
    """One GPU in NVML: `read` counts metrics with a value, `missing` has reasons of the others."""

    lost: str | None = None
    read: int = 0
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProbe:
    """Facts about the host; sizes in bytes, None if unknown or not applicable."""

    python: str
    executable: str
    version: str
    runs: str
    recording_error: str | None
    free: int | None
    nvml_reason: str | None
    nvml_broken: bool  # The reason needs a repair: a wrong package, or a driver updated in use.
    device_nodes: bool  # /dev/nvidiactl exists, so this process should have a GPU
    driver: str | None
    gpus: tuple[GpuProbe, ...]
    torch: dict[str, Any] | None  # `_ASK_TORCH`'s output, or version and "error"; None without it.
    visible_devices: str | None
    page: str | None  # why the page cannot be opened
    shared_memory: int | None
    alerts: dict[str, Any] = field(default_factory=dict)  # see `alerts_file`


def survey(root: Path) -> MachineProbe:
    """Measure all parts; takes as long as `import torch` (seconds)."""
    return MachineProbe(
        python=platform.python_version(),
        executable=sys.executable,
        version=__version__,
        runs=str(root.resolve()),
        recording_error=try_recording(root),
        free=_disk(_existing(root), "free"),
        **ask_nvml(),
        device_nodes=Path("/dev/nvidiactl").exists(),
        torch=ask_torch(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        page=missing(PAGE),
        shared_memory=_disk(Path("/dev/shm"), "total"),
        alerts=alerts_file(),
    )


def alerts_file() -> dict[str, Any]:
    """Return facts about alerts.toml without the webhook's secret address."""
    settings = load()
    return {
        "path": None if settings.path is None else str(settings.path),
        "found": settings.found,
        "rules": sum(rule.enabled for rule in settings.rules),
        "command": None if settings.command is None else settings.command.argv[0],
        "webhook": None if settings.webhook is None else settings.webhook.shown,
        "problem": settings.problem,
    }


def try_recording(root: Path) -> str | None:
    """Record and read one row in a temporary folder near `root`; return the error, or None."""
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_existing(root)) as folder:
            recorder = Recorder(Path(folder), name="doctor", kind=RunKind.RECORD)
            recorder.log(1, {"train/loss": 1.0})
            recorder.close(RunStatus.FINISHED)
            with StoreReader(Path(folder)) as reader:
                if [series.rows for series in reader.series()] != [1]:
                    return "a row that was recorded could not be read again"
    except (OSError, StoreError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def ask_nvml(source: DeviceSource | None = None) -> dict[str, Any]:
    """Return NVML's values of every GPU, within NVML_TIMEOUT_S."""

    def query() -> dict[str, Any]:
        opened = source or open_source()
        infos = opened.devices()
        return {
            "nvml_reason": opened.reason,
            "nvml_broken": opened.reason is not None and math.isinf(opened.retry_at),
            "driver": infos[0].driver_version if infos else None,
            "gpus": tuple(_survey_gpu(opened, info) for info in infos),
        }

    try:
        return call_driver(query, NVML_TIMEOUT_S)
    except TimeoutError:
        reason = f"The NVIDIA driver did not answer within {NVML_TIMEOUT_S:g} s."
    except Exception as error:  # noqa: BLE001 - the other checks still apply
        reason = f"NVML failed: {type(error).__name__}: {str(error)[:100]}."
    return {"nvml_reason": reason, "nvml_broken": True, "driver": None, "gpus": ()}


def _survey_gpu(source: DeviceSource, info: DeviceInfo) -> GpuProbe:
    source.arm_gpm(True)
    source.read(info.uuid, *SamplingTier)
    time.sleep(BETWEEN_S)
    values = source.read(info.uuid, *SamplingTier)
    missing = {key: why for key, why in source.reasons(info.uuid).items() if key not in values}
    source.arm_gpm(False)
    lost = source.lost(info.uuid)
    return GpuProbe(**asdict(info), lost=lost, read=len(values), missing=missing)


def ask_torch(python: str = sys.executable) -> dict[str, Any] | None:
    """Import torch in a child process and return its properties; None if not installed."""
    version, command = installed_torch(), [python, "-c", _ASK_TORCH]
    if version is None:
        return None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"version": version, "error": f"no answer within {TORCH_TIMEOUT_S:g} s"}
    if answer.returncode == 0:
        return {"version": version, **json.loads(answer.stdout.splitlines()[-1])}
    lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return {"version": version, "error": lines[-1]}


def _existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _disk(folder: Path, what: str) -> int | None:
    with suppress(OSError):
        return int(getattr(shutil.disk_usage(folder), what))
    return None


GET_TORCH = "Install a CUDA build for this driver: https://pytorch.org/get-started."
MIN_FREE_BYTES = 2**30
MIN_SHARED_MEMORY_BYTES = 2**30

EXAMPLES = ("stepscope doctor", "stepscope doctor --json")


class CheckStatus(StrEnum):
    """Status of a part."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


OK, MISSING, BROKEN = CheckStatus
_SIGNS = {OK: "ok", MISSING: "–", BROKEN: "✗"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Line of the report; `remedy` is a sentence, or empty."""

    mark: CheckStatus
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_SIGNS[self.mark]:<4}{self.what}: {self.detail.rstrip('.')}."
        return f"{line} {self.remedy}" if self.remedy else line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument("--json", action="store_true", help="findings and facts as JSON")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the report; return 1 if any part is broken."""
    machine = survey(root)
    results = list(findings(machine))
    broken = sum(finding.mark is BROKEN for finding in results)
    if options.json:
        report = {
            "ok": not broken,
            "findings": [asdict(finding) for finding in results],
            "facts": asdict(machine),
        }
        print(json.dumps(report, indent=1))
    else:
        print(*results, "", sep="\n")
        does = "thing does" if broken == 1 else "things do"
        print(f"{broken} {does} not work; see ✗ above." if broken else "Recording works here.")
    return 1 if broken else 0


def findings(machine: MachineProbe) -> Iterator[CheckResult]:
    """Yield the status of each part."""
    yield CheckResult(OK, "Python", f"{machine.python} ({machine.executable})")
    yield CheckResult(OK, "stepscope", machine.version)
    yield _run_folder(machine)
    yield _driver(machine)
    for gpu in machine.gpus:
        yield _gpu(gpu)
    yield _torch(machine)
    problem = unsupported(machine.torch["version"]) if machine.torch else None
    if problem is not None:
        remedy = f"Install torch {SUPPORTED}."
        yield CheckResult(MISSING, "torch version", problem, remedy)
    if machine.shared_memory is not None and machine.shared_memory < MIN_SHARED_MEMORY_BYTES:
        detail = f"only {format_bytes(machine.shared_memory)}: DataLoader workers need more"
        remedy = "In a container, start it with --shm-size=8g."
        yield CheckResult(MISSING, "/dev/shm", detail, remedy)
    yield from _alerts(machine.alerts)
    if machine.page is None:
        yield CheckResult(OK, "page", "'stepscope ui' opens it")
    else:
        yield CheckResult(MISSING, "page", machine.page)


def _run_folder(machine: MachineProbe) -> CheckResult:
    if machine.recording_error is not None:
        detail = f"{machine.runs} cannot hold a run: {machine.recording_error}"
        remedy = "Set STEPSCOPE_RUNS to a writable folder."
        return CheckResult(BROKEN, "run folder", detail, remedy)
    detail = f"{machine.runs}, {format_bytes(machine.free)} free"
    if machine.free is not None and machine.free < MIN_FREE_BYTES:
        remedy = "A run takes about 200 MB per day; free disk space or set STEPSCOPE_RUNS."
        return CheckResult(BROKEN, "run folder", detail, remedy)
    return CheckResult(OK, "run folder", detail)


def _driver(machine: MachineProbe) -> CheckResult:
    if machine.nvml_reason is None:
        detail = f"driver {machine.driver}, {_count(len(machine.gpus))}"
        return CheckResult(OK, "NVIDIA driver", detail)
    detail = machine.nvml_reason
    if machine.device_nodes:
        detail += " But /dev/nvidiactl exists"
    elif machine.torch and machine.torch.get("available"):
        detail += " Yet torch sees a GPU"
    elif not machine.nvml_broken:
        return CheckResult(MISSING, "NVIDIA driver", detail, "GPU values are missing.")
    remedy = "Check that nvidia-smi works; utilization, power and temperature are missing."
    return CheckResult(BROKEN, "NVIDIA driver", detail, remedy)


def _gpu(gpu: GpuProbe) -> CheckResult:
    what = f"GPU {gpu.nvml_index}"
    if gpu.lost is not None:
        remedy = "Look for 'Xid' in dmesg; the GPU may need a reset."
        return CheckResult(BROKEN, what, f"{gpu.name}, {gpu.uuid}: {gpu.lost}", remedy)
    size = format_bytes(gpu.memory_total)
    detail = f"{gpu.name}, {size}, {gpu.uuid}, {gpu.read} metrics"
    if gpu.mig:
        detail += "; MIG is on, so its utilization is not given"
    missing = [f"{key} ({reason})" for key, reason in gpu.missing.items()]
    if missing:
        detail += f"; without {', '.join(missing)}"
    rights = "permission" in gpu.missing.values()
    remedy = "Ask the administrator to let users read the GPU's counters." if rights else ""
    return CheckResult(OK if gpu.read else BROKEN, what, detail, remedy)


def _torch(machine: MachineProbe) -> CheckResult:
    torch = machine.torch
    if torch is None:
        remedy = "'stepscope record' works without it; a training script needs it."
        detail = "not installed in this environment"
        return CheckResult(MISSING, "torch", detail, remedy)
    detail = torch["version"]
    if "error" in torch:
        detail += f" cannot be imported: {torch['error']}"
        return CheckResult(BROKEN, "torch", detail, "Install it again.")
    if torch["cuda"] is None:
        mark = BROKEN if machine.gpus else OK
        remedy = GET_TORCH if machine.gpus else ""
        return CheckResult(mark, "torch", f"{detail}, a build without CUDA", remedy)
    return _torch_devices(machine, torch, f"{detail}, built for CUDA {torch['cuda']}")


def _torch_devices(machine: MachineProbe, torch: dict[str, Any], built: str) -> CheckResult:
    """Compare the GPUs of a CUDA build of torch with the driver's."""
    have, visible = len(machine.gpus), machine.visible_devices
    if torch["available"]:
        seen = len(torch["devices"])
        return CheckResult(OK, "torch", f"{built}; sees {seen} of {_count(max(seen, have))}")
    if not have:
        return CheckResult(MISSING, "torch", f"{built}; there is no GPU for it here")
    if visible is not None and visible.strip() in ("", "-1"):
        detail = f"{built}; CUDA_VISIBLE_DEVICES hides every GPU from it"
        return CheckResult(MISSING, "torch", detail, "Unset it to train on a GPU.")
    detail = f"{built}, does not see the GPU: {next(iter(torch['warnings']), 'it gives no reason')}"
    return CheckResult(BROKEN, "torch", detail, GET_TORCH)


def _alerts(file: dict[str, Any]) -> Iterator[CheckResult]:
    if file.get("path") is None:
        yield CheckResult(OK, "alerts", "switched off by STEPSCOPE_ALERTS")
        return
    channels = [f"the {kind} {file[kind]}" for kind in ("command", "webhook") if file[kind]]
    where = file["path"] if file["found"] else f"no file {file['path']}"
    target = f"delivered to {' and '.join(channels)}" if channels else "shown on the page only"
    yield CheckResult(OK, "alerts", f"{where}; {file['rules']} rules, {target}")
    if file["problem"] is not None:
        yield CheckResult(BROKEN, "alerts", file["problem"])


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"
