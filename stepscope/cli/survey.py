"""What `stepscope doctor` looks at: software, GPUs and limits of this machine.

Nothing here can hang or end the command: torch is imported by another process, NVML is called in a
thread that may be left behind, and a value that cannot be found out is None or an error's text.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stepscope import __version__
from stepscope.alerts.config import load
from stepscope.cli.ui import page_missing
from stepscope.gpu.nvml_queries import Tier
from stepscope.gpu.source import DeviceInfo, DeviceSource, NullSource, open_source
from stepscope.host.usage import HostSource
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunKind, RunStatus
from stepscope.store import RunReader, StoreError

NVML_TIMEOUT_S = 15.0
BETWEEN_S = 0.15
"""Between two readings: rates need two, and the first of a GPU that slept may give nothing."""
TORCH_TIMEOUT_S = 120.0
"""`import torch` from a cold network disk has been seen to take a minute."""

PACKAGES = ("nvidia-ml-py", "streamlit", "plotly", "pyarrow", "tensorboard")

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
class Gpu(DeviceInfo):
    """One GPU as NVML shows it: `read` metrics have a value, `missing` has the others' reasons."""

    lost: str | None = None
    read: int = 0
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsFile:
    """What alerts.toml says; without the webhook's address, which is a secret."""

    path: str | None = None
    """None: alerts are switched off."""
    found: bool = False
    rules: int = 0
    """Rules that are on, the default ones among them."""
    command: str | None = None
    webhook: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found; sizes in bytes, None for what does not apply or cannot be found out."""

    python: str
    executable: str
    version: str
    runs: str
    recording_error: str | None
    free: int | None
    sqlite: str
    nvml_reason: str | None
    nvml_broken: bool
    """The reason needs a repair: a wrong package, a driver that was updated while loaded."""
    device_nodes: bool
    """/dev/nvidiactl exists, so this process was meant to have a GPU."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    torch: dict[str, Any] | None
    """The answer of `_ASK_TORCH`, or its version and "error"; None: not installed."""
    visible_devices: str | None
    page: str | None
    """Why the page cannot be opened."""
    packages: dict[str, str | None]
    memory_limit: float | None
    """What the container may use."""
    cpu_limit: float | None
    shared_memory: int | None
    alerts: AlertsFile = field(default_factory=AlertsFile)


def survey(root: Path) -> Machine:
    """Look at everything; takes as long as `import torch` (seconds)."""
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        version=__version__,
        runs=str(root.resolve()),
        recording_error=try_recording(root),
        free=_disk(_existing(root), "free"),
        sqlite=sqlite3.sqlite_version,
        **ask_nvml(),
        device_nodes=Path("/dev/nvidiactl").exists(),
        torch=ask_torch(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        page=page_missing(),
        packages={name: _installed(name) for name in PACKAGES},
        memory_limit=_memory_limit(),
        cpu_limit=_cpu_limit(),
        shared_memory=_disk(Path("/dev/shm"), "total"),
        alerts=alerts_file(),
    )


def alerts_file() -> AlertsFile:
    """Return what would alert here, and who would be told."""
    settings = load()
    return AlertsFile(
        path=None if settings.path is None else str(settings.path),
        found=settings.found,
        rules=sum(rule.enabled for rule in settings.rules),
        command=None if settings.command is None else settings.command.argv[0],
        webhook=None if settings.webhook is None else settings.webhook.shown,
        problems=settings.problems,
    )


def try_recording(root: Path) -> str | None:
    """Record and read one row in a hidden folder, which is removed; return what failed.

    The folder is made where `root` is, or in the nearest parent that exists.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_existing(root)) as folder:
            recorder = Recorder(Path(folder), name="doctor", kind=RunKind.RECORD)
            recorder.log(1, {"train/loss": 1.0})
            recorder.close(RunStatus.FINISHED)
            with RunReader(Path(folder)) as reader:
                if [series.rows for series in reader.series()] != [1]:
                    return "a row that was recorded could not be read again"
    except (OSError, StoreError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def ask_nvml(source: DeviceSource | None = None) -> dict[str, Any]:
    """Return what NVML gives of every GPU, waiting NVML_TIMEOUT_S at most."""
    silent = f"The NVIDIA driver did not answer within {NVML_TIMEOUT_S:g} s."
    answer: dict[str, Any] = {
        "nvml_reason": silent,
        "nvml_broken": True,
        "driver": None,
        "gpus": (),
    }

    def ask() -> None:
        found = source or open_source()
        infos = found.devices()
        gpus = tuple(_survey_gpu(found, info) for info in infos)
        broken = isinstance(found, NullSource) and math.isinf(found.retry_at)
        driver = infos[0].driver_version if infos else None
        answer.update(nvml_reason=found.reason, nvml_broken=broken, driver=driver, gpus=gpus)

    # A broken GPU can block a call for ever; a daemon thread does not keep the command alive.
    thread = threading.Thread(target=ask, name="doctor-nvml", daemon=True)
    thread.start()
    thread.join(NVML_TIMEOUT_S)
    return dict(answer)


def _survey_gpu(source: DeviceSource, info: DeviceInfo) -> Gpu:
    source.arm_gpm(True)
    source.read(info.uuid, *Tier)
    time.sleep(BETWEEN_S)
    values = source.read(info.uuid, *Tier)
    missing = {key: why for key, why in source.reasons(info.uuid).items() if key not in values}
    source.arm_gpm(False)
    lost = source.lost(info.uuid)
    return Gpu(**asdict(info), lost=lost, read=len(values), missing=missing)


def ask_torch(python: str = sys.executable) -> dict[str, Any] | None:
    """Return what torch says of itself in a process of its own; None where it is not installed."""
    version, command = _installed("torch"), [python, "-c", _ASK_TORCH]
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


def _installed(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _disk(folder: Path, what: str) -> int | None:
    with suppress(OSError):
        return int(getattr(shutil.disk_usage(folder), what))
    return None


def _memory_limit() -> float | None:
    """Return the host memory that the sampler records where it is less than the host has."""
    total = HostSource().host()["host/mem_total"]
    return total if total < psutil.virtual_memory().total else None


def _cpu_limit() -> float | None:
    """Return how many CPUs this container (cgroup v2) may use at once."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no container, or the word "max" for no limit
        return None
