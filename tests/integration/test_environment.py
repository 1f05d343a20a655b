"""What a run notes of the machine, the versions and the code that it ran with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope.host.environment import environment


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with one git commit."""
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_run_on_a_gpu_names_all_it_ran_with(code: Path) -> None:
    found = environment("580.65", "NVIDIA H100", code)
    head = (code / ".git" / (code / ".git" / "HEAD").read_text().split()[1]).read_text().strip()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    assert found.items() >= versions.items()
    assert found["python"] == sys.version.split()[0]
    assert (found["driver"], found["gpu"]) == ("580.65", "NVIDIA H100")
    assert (found["cores"], found["threads"]) == (os.cpu_count(), torch.get_num_threads())
    assert (found["host"], found["commit"]) == (socket.gethostname(), head)
    assert found["cpu"]
    assert found["platform"]


def test_what_does_not_exist_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    found = environment(None, None, tmp_path)
    missing = {name for name, value in found.items() if value is None}
    assert missing == {"torch", "cuda", "cudnn", "driver", "gpu", "threads", "commit"}
