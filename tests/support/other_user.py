"""Another user of this host: who attacks a server, forwards its port, or may not read all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY, SOMEBODY = 65534, 61234
SCRIPT = Path(__file__).parents[1] / "scripts" / "other_user.py"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def send_as(
    uid: int, port: int, requests: Sequence[str], host: str = "127.0.0.1", leave: bool = False
) -> list[str]:
    """Return the status line of the answer to each request; empty ones if the user leaves."""
    command = [sys.executable, str(SCRIPT), str(uid), host, str(port)]
    command += ["--leave"] if leave else []
    text = json.dumps(list(requests))
    ended = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(ended.stdout))


@contextmanager
def relay_of(uid: int, port: int) -> Iterator[int]:
    """Yield a port that a process of another user forwards to `port`, as a proxy of the host."""
    command = [sys.executable, str(SCRIPT), str(uid), "127.0.0.1", str(port), "--relay"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


@contextmanager
def not_root() -> Iterator[None]:
    """Lose the right to read everything, which only root has."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Make a folder that every user can reach, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)
