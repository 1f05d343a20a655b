"""What a run ran on, for run.json: versions, driver, devices, host, commit."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from trainer.devices import cpu_name
from trainer.problems import TrainDevice


def environment(device: TrainDevice, driver: str | None) -> dict[str, Any]:
    """Return the facts as JSON values; None where there is no such thing here."""
    on_gpu = device.cuda_index is not None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]
        "driver": driver,
        "gpu": device.name if on_gpu else None,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The git commit of this code; None for a copy without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
