"""The environment that a run records: host, versions and commit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope.host.environment import environment


def test_the_environment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    nothing = environment(None, None, tmp_path)["commit"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    git = tmp_path / ".git"
    head = (git / (git / "HEAD").read_text().split()[1]).read_text().strip()
    found = environment("580.65", "NVIDIA H100", tmp_path)
    expected = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "driver": "580.65",
        "gpu": "NVIDIA H100",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "commit": head,
    }
    assert found.items() >= expected.items()
    assert found["cpu"]
    assert found["platform"]
    assert nothing is None
    monkeypatch.delitem(sys.modules, "torch")
    found = environment(None, None, None)
    missing = {name for name, value in found.items() if value is None}
    assert missing == {"torch", "cuda", "cudnn", "driver", "gpu", "threads", "commit"}
