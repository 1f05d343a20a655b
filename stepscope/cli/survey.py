"""Gathers what `stepscope doctor` judges: facts about this machine, each at its own risk.

Nothing here can hang or end the command: torch is asked in a process of its own, NVML in a thread
that may stay behind, and what cannot be found out is None or carries the error as text.
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
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stepscope import __version__
from stepscope.cli.ui import page_missing
from stepscope.metrics import METRICS, Stream
from stepscope.recording.recorder import Recorder
from stepscope.run import RunKind, RunStatus
from stepscope.sampling.nvml import DeviceInfo, DeviceSource, NullSource, open_source
from stepscope.sampling.nvml_fields import Tier
from stepscope.store import STORE_NAME, RunReader, StoreError

NVML_TIMEOUT_S = 15.0
TORCH_TIMEOUT_S = 120.0
"""Importing torch from a cold network disk has been seen to take a minute."""

_ASK_TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    available = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "hip": getattr(torch.version, "hip", None), "available": available, "devices": names,
    "warnings": [str(entry.message).split(" (Triggered")[0] for entry in caught],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML shows it; `missing` says of each metric that it does not give why."""

    uuid: str
    name: str
    nvml_index: int
    memory_total: int | None
    mig: bool
    lost: str | None = None
    read: int = 0
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found; sizes in bytes, None where it does not apply or could not be found out."""

    python: str
    executable: str
    version: str
    runs: str
    recording_error: str | None
    journal: str | None
    file_system: str | None
    free: int | None
    sqlite: str
    nvml_reason: str | None
    nvml_broken: bool
    """The reason will not pass by itself: a wrong package, a driver updated while loaded."""
    device_nodes: bool
    """/dev/nvidiactl is there: somebody meant this process to use a GPU."""
    pci_gpu: bool
    """An NVIDIA GPU is on the PCI bus, though perhaps not for this container."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    torch: dict[str, Any] | None
    """None: not installed. Else what torch says, or {"error": …}."""
    visible_devices: str | None
    mps: bool
    page: str | None
    """Why the page cannot be opened."""
    packages: dict[str, str | None]
    memory_limit: int | None
    """Of the container, where it is below what the host has."""
    cpu_limit: float | None
    shared_memory: int | None


def gather(root: Path) -> Facts:
    """Look at everything; takes as long as `import torch` does (seconds)."""
    recording_error, journal = try_recording(root)
    nvml = ask_nvml()
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        version=__version__,
        runs=str(root.resolve()),
        recording_error=recording_error,
        journal=journal,
        file_system=_file_system(root),
        free=_free(root),
        sqlite=sqlite3.sqlite_version,
        **nvml,
        device_nodes=Path("/dev/nvidiactl").exists(),
        pci_gpu=_pci_gpu(),
        torch=ask_torch(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        mps=Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists(),
        page=page_missing(),
        packages={
            name: _installed(name)
            for name in ("nvidia-ml-py", "streamlit", "plotly", "pyarrow", "tensorboard")
        },
        memory_limit=_memory_limit(),
        cpu_limit=_cpu_limit(),
        shared_memory=_shared_memory(),
    )


def try_recording(root: Path) -> tuple[str | None, str | None]:
    """Record a row where `root` is or would be, and read it; return what failed and the journal.

    The run is made in a hidden folder that no list shows, and removed.
    """
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".doctor-", dir=_existing(root)))
    except OSError as error:
        return error.strerror or str(error), None
    try:
        return None, _record_once(scratch)
    except (OSError, StoreError, sqlite3.Error) as error:
        return str(error), None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _record_once(folder: Path) -> str:
    """Record one row, read it and return the store's journal mode. Raises what fails."""
    recorder = Recorder(folder, name="doctor", kind=RunKind.RECORD)
    try:
        recorder.log(1, {"train/loss": 1.0})
        with closing(sqlite3.connect(folder / STORE_NAME)) as connection:
            journal = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        recorder.close(RunStatus.FINISHED)
    with RunReader(folder) as reader:
        if [series.rows for series in reader.series()] != [1]:
            raise StoreError("a row that was recorded could not be read again")
    return journal


def ask_nvml(source: DeviceSource | None = None) -> dict[str, Any]:
    """Return what NVML gives of every GPU; a driver that hangs costs NVML_TIMEOUT_S."""
    answer: dict[str, Any] = {
        "nvml_reason": f"The NVIDIA driver did not answer within {NVML_TIMEOUT_S:g} s.",
        "nvml_broken": True,
        "driver": None,
        "gpus": (),
    }

    def ask() -> None:
        found = open_source() if source is None else source
        infos = found.devices()
        gpus = tuple(_gpu(found, info) for info in infos)
        answer.update(
            nvml_reason=found.reason,
            nvml_broken=isinstance(found, NullSource) and math.isinf(found.retry_at),
            driver=infos[0].driver_version if infos else None,
            gpus=gpus,
        )

    # A daemon: a sick GPU can hold a call for ever, and the command must end all the same.
    thread = threading.Thread(target=ask, name="doctor-nvml", daemon=True)
    thread.start()
    thread.join(NVML_TIMEOUT_S)
    return dict(answer)


def _gpu(source: DeviceSource, info: DeviceInfo) -> Gpu:
    values = source.read(info.uuid, *Tier)
    if not values:  # the first read of a GPU that was asleep may give nothing
        time.sleep(0.1)
        values = source.read(info.uuid, *Tier)
    known = {metric.key for metric in METRICS if metric.stream is Stream.DEVICES}
    missing = {key: why for key, why in source.reasons(info.uuid).items() if key not in values}
    return Gpu(
        uuid=info.uuid,
        name=info.name,
        nvml_index=info.nvml_index,
        memory_total=info.memory_total,
        mig=info.mig,
        lost=source.lost(info.uuid),
        read=len(known & values.keys()),
        missing=missing,
    )


def ask_torch(python: str = sys.executable) -> dict[str, Any] | None:
    """Return what torch says of itself in a process of its own; None where it is not installed."""
    installed = _installed("torch")
    if installed is None:
        return None
    said = ""
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
        said = answer.stderr.strip() or f"exit code {answer.returncode}"
        found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        said = f"no answer within {TORCH_TIMEOUT_S:g} s"
    except (OSError, ValueError, IndexError) as error:
        said = said or str(error)
    else:
        return found
    return {"version": installed, "error": said.splitlines()[-1]}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def _free(root: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(root)).free
    except OSError:
        return None


def _file_system(root: Path) -> str | None:
    """The type of the file system that holds `root`."""
    folder = str(_existing(root)) + "/"
    inside = [
        (len(part.mountpoint), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if folder.startswith(part.mountpoint.rstrip("/") + "/")
    ]
    return max(inside)[1] if inside else None


def _pci_gpu() -> bool:
    """Say whether a display or 3D controller of NVIDIA is on the PCI bus."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def _memory_limit() -> int | None:
    text = _read("/sys/fs/cgroup/memory.max") or _read(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    limit = int(text) if text and text.isdecimal() else None
    return limit if limit is not None and limit < psutil.virtual_memory().total else None


def _cpu_limit() -> float | None:
    """CPUs that the container may use at once, where that is fewer than the host has."""
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "").partition(" ")
    if not quota.isdecimal() or not period.isdecimal():
        return None
    limit = int(quota) / int(period)
    return limit if limit < (os.cpu_count() or 1) else None


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
