"""The suite's own tools: tests that hang, crash, skip and leave state; jobs that fail."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.child_process import run_python

pytestmark = pytest.mark.slow

PLUGINS = (
    *("-p", "tests.support.suite", "-p", "tests.support.process_state"),
    *("-p", "no:cacheprovider", "-p", "no:randomly", "-c", "/dev/null"),
)

HANG_IN_C = """
import itertools
def test_hang():
    sum(itertools.repeat(0, 10**14))  # in C, where no handler of a signal runs
"""
FINE = "def test_fine(): pass\n"
CRASH = """
import os
def test_before(): pass
def test_crash(): os.abort()
def test_after(): pass
"""
LEAKS = """
import os, signal, sys, threading
def test_variable(): os.environ["LEFT"] = "1"
def test_no_variable(): assert "LEFT" not in os.environ
def test_missing(): del os.environ["HOME"]
def test_path(): sys.path.insert(0, "left")
def test_folder(): os.chdir("/")
def test_handler(): signal.signal(signal.SIGUSR1, lambda *_: None)
def test_thread(): threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
def test_nothing():
    assert "left" not in sys.path and os.getcwd() != "/" and "HOME" in os.environ
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
"""


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return run_python("-m", "pytest", *PLUGINS, f"--rootdir={folder}", *arguments, str(folder))


def test_a_hang_in_c_ends_with_the_stack_of_its_thread(tmp_path: Path) -> None:
    limits = ("--timeout", "1", "--hang-grace", "1")
    done = run(tmp_path, "-n", "2", *limits, hang=HANG_IN_C, fine=FINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in done.stdout
    assert "test_hang.py" in done.stderr + done.stdout
    assert "Timeout (0:00:02)!" in done.stderr + done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_crash_fails_one_test_and_the_others_run(workers: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-n", workers, "--dist", "loadgroup", crash=CRASH, fine=FINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 3 passed" in done.stdout


def test_what_a_test_leaves_in_the_process_is_an_error_of_that_test(tmp_path: Path) -> None:
    done = run(tmp_path, "-rE", leaks=LEAKS)
    assert "8 passed, 6 errors" in done.stdout
    named = set(re.findall(r"^ERROR \S+::test_(\w+)", done.stdout, re.MULTILINE))
    leaking = {"variable", "missing", "path", "folder", "handler", "thread"}
    assert named == leaking


@pytest.mark.parametrize(("pattern", "code"), [("test_skip.py::*", 0), ("test_other.py::*", 1)])
def test_a_skip_without_a_pattern_fails_the_run(pattern: str, code: int, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# comment\n{pattern}  # why\n")
    skip = "import pytest\ndef test_skips(): pytest.skip('no such machine')\n"
    done = run(tmp_path, "--allowed-skips", str(allowed), skip=skip, fine=FINE)
    assert done.returncode == code
    assert ("test_skip.py::test_skips: Skipped: no such machine" in done.stdout) == bool(code)
