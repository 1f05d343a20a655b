"""simulator/setup.sh: what each version of torch is compiled with, without a download."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "- "*) mkdir -p "$2/include" && touch "$2/include/nvml.h" ;;
  *" download "*) echo "$@" >> "$FAKE/downloads" ;;
  *purelib*) echo "$FAKE/site" ;;
  *version*torch*) echo "$TORCH" ;;
esac
"""
READELF = """#!/bin/sh
case $TORCH in 2.6.*) echo "[libcudart.so.12]" ;; *) echo "[libcudart.so.13]" ;; esac
"""


def test_each_version_of_torch_is_built_with_the_headers_of_its_cuda(tmp_path: Path) -> None:
    """The compilers are missing here, so that it ends after the headers."""
    (tmp_path / "site/torch/lib").mkdir(parents=True)
    (tmp_path / "site/torch/lib/libtorch_cuda.so").touch()
    for path, text in (("venv/bin/python", PYTHON), ("readelf", READELF), ("g++", "exit 1")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    script = shutil.copy(ROOT / "simulator/setup.sh", tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for version in ("2.13.0", "2.6.0", "2.6.0"):
        env = {"PATH": path, "TORCH": version, "FAKE": str(tmp_path)}
        command = ["sh", script, str(tmp_path / "venv"), version]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert "building" in done.stdout, done.stderr
    first, second = (tmp_path / "downloads").read_text().splitlines()
    assert " nvidia-cuda-runtime==13." in first
    assert " nvidia-cuda-runtime-cu12==12." in second
