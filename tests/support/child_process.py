"""Python in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys
file = open(sys.argv[1], sys.argv[2], buffering=0)
print(flush=True)
input()
"""


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


def child(code: str) -> str:
    """Run the code, where a warning is an error, and return what it printed."""
    done = run_python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def holding(file: str | Path, mode: str = "ab") -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that has a file open, as a script has its store."""
    command = [sys.executable, "-c", HOLD, str(file), mode]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def processes_with(text: str) -> set[int]:
    """Return the other processes with a text in their environment, of lines that end in NUL."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ends just now, or is another user's
            if text.encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found - {os.getpid()}
