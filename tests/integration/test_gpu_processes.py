"""What ends the processes of the CUDA tests, on processes without CUDA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import gpu_processes

LEFT = "print('ready', flush=True); import sys; sys.stdin.read()"


@pytest.fixture
def left() -> Iterator[subprocess.Popen[str]]:
    """Return a process that nobody ends but its test."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", LEFT]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child


def test_a_process_that_is_left_fails_its_test_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(gpu_processes, "ENDS_S", 0.0)
    with pytest.raises(pytest.fail.Exception) as failure, gpu_processes.none_left():
        child = request.getfixturevalue("left")
    assert f"process {child.pid}: {sys.executable}" in str(failure.value)
    assert "PYTEST_CURRENT_TEST=tests/integration/test_gpu_processes.py::" in str(failure.value)
    assert child.wait(20) < 0


def test_a_process_from_before_may_stay(left: subprocess.Popen[str]) -> None:
    with gpu_processes.none_left():
        assert left.pid in gpu_processes.started()
    assert left.poll() is None
