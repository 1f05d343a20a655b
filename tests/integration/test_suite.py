"""The suite's plugin: pytest as a process, on tests that hang and skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("-p", "tests.support.suite", "-p", "no:cacheprovider", "-c", "/dev/null")

HANG_IN_C = """
import itertools
def test_hang():
    sum(itertools.repeat(0, 10**14))  # in C, where no handler of a signal runs
"""
FINE = "def test_fine(): pass\n"


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, f"--rootdir={folder}", *arguments, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_hang_in_c_ends_with_the_stack_of_its_thread(tmp_path: Path) -> None:
    limits = ("--timeout", "1", "--hang-grace", "1")
    done = run(tmp_path, "-n", "2", *limits, hang=HANG_IN_C, fine=FINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in done.stdout
    assert "test_hang.py" in done.stderr + done.stdout
    assert "Timeout (0:00:02)!" in done.stderr + done.stdout


@pytest.mark.parametrize(("pattern", "code"), [("test_skip.py::*", 0), ("test_other.py::*", 1)])
def test_a_skip_without_a_pattern_fails_the_run(pattern: str, code: int, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# comment\n{pattern}  # why\n")
    skip = "import pytest\ndef test_skips(): pytest.skip('no such machine')\n"
    done = run(tmp_path, "--allowed-skips", str(allowed), skip=skip, fine=FINE)
    assert done.returncode == code
    assert ("test_skip.py::test_skips: Skipped: no such machine" in done.stdout) == bool(code)
