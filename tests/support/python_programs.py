"""Python programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    *arguments: str, cwd: Path = ROOT, timeout_s: float = 110, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the project importable; return exit code and output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
