"""The suite's plugin: pytest as a process, on tests that abort, hang, wait, flake and skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("-p", "tests.support.suite", "-p", "no:cacheprovider", "-c", "/dev/null")

ABORT = "import os\ndef test_abort(): os.abort()\n"
HANG_IN_C = """
import itertools
def test_hang():
    sum(itertools.repeat(0, 10**14))  # in C, where no handler of a signal runs
"""
WAIT_FOR_EVER = """
import pytest, time
@pytest.mark.timeout(0)
def test_wait(): time.sleep(600)
"""
FINE = "def test_fine(): pass\n"
FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("n", range({tests}))
def test_flaky(n, request):
    seen = pathlib.Path(__file__).with_name(f"seen{{n}}")
    if not seen.exists():
        seen.touch()
        raise AssertionError
"""


def run(
    folder: Path, *arguments: str, typed: str | None = None, **files: str
) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, f"--rootdir={folder}", *arguments, str(folder)],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_worker_that_aborts_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--dist", "loadfile", abort=ABORT, fine=FINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_abort.py::test_abort" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr + done.stdout


def test_a_hang_in_c_ends_with_the_stack_of_its_thread(tmp_path: Path) -> None:
    limits = ("--timeout", "1", "--hang-grace", "1")
    done = run(tmp_path, "-n", "2", *limits, hang=HANG_IN_C, fine=FINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in done.stdout
    assert "test_hang.py" in done.stderr + done.stdout
    assert "Timeout (0:00:02)!" in done.stderr + done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_stalled_run_ends_with_a_list_of_running_tests(workers: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-n", workers, "--stall-limit", "5", wait=WAIT_FOR_EVER, fine=FINE)
    assert done.returncode == 70
    listed = done.stderr[done.stderr.index("running:") :]
    assert "test_wait.py::test_wait" in listed
    assert "test_fine" not in listed


def test_a_run_that_waits_in_the_debugger_continues(tmp_path: Path) -> None:
    typed = "import time; time.sleep(4)\nc\n"
    stop = "def test_stop(): breakpoint()\n"
    done = run(tmp_path, "-n", "0", "--stall-limit", "1", typed=typed, stop=stop)
    assert done.returncode == pytest.ExitCode.OK, done.stderr


@pytest.mark.parametrize(("tests", "code"), [(2, 0), (3, 1)])
def test_more_than_two_reruns_fail_the_run(tests: int, code: int, tmp_path: Path) -> None:
    limits = ("--reruns", "1", "--max-suite-reruns", "2", "-raR")
    done = run(tmp_path, "-n", "2", *limits, flaky=FLAKY.format(tests=tests))
    assert done.returncode == code
    assert done.stdout.count("\nRERUN ") == 2
    assert done.stdout.count("\nFAILED ") == tests - 2


@pytest.mark.parametrize(("pattern", "code"), [("test_skip.py::*", 0), ("test_other.py::*", 1)])
def test_a_skip_without_a_pattern_fails_the_run(pattern: str, code: int, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# comment\n{pattern}  # why\n")
    skip = "import pytest\ndef test_skips(): pytest.skip('no such machine')\n"
    done = run(tmp_path, "--allowed-skips", str(allowed), skip=skip, fine=FINE)
    assert done.returncode == code
    assert ("test_skip.py::test_skips: Skipped: no such machine" in done.stdout) == bool(code)
