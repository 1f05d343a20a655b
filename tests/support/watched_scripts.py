"""Scripts under `stepscope watch`, and the same scripts bare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.run import RunInfo, RunStatus, read_run, run_folders
from tests.support.child_process import ROOT, run_python
from tests.support.run_values import metric

SCRIPTS = ROOT / "tests" / "scripts"
AS_MODULE = [sys.executable, "-m", "stepscope.watch"]


def run(command: list[str], tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        cwd=SCRIPTS,
        capture_output=True,
        input=b"typed\n",
        timeout=100,
        env={**os.environ, "STEPSCOPE_RUNS": str(tmp_path), "PYTHONIOENCODING": "utf-8", **environ},
    )


def watched_like_bare(
    tmp_path: Path,
    *script: str,
    watch: list[str] = AS_MODULE,
    last_line: str | None = None,
    **environ: str,
) -> RunInfo:
    """Run a script both ways, compare all that can be seen of it, and return its run.

    Of a script that trains nothing the last line is ours, and has to contain `last_line`.
    """
    bare = run([sys.executable, *script], tmp_path, **environ)
    seen = run([*watch, *script], tmp_path, **environ)
    assert seen.stdout == bare.stdout
    ours, _, errors = seen.stderr.partition(b"\n")
    assert ours.startswith(b"stepscope: recording into ")
    errors, why, rest = errors.partition(b"stepscope: No training step was seen: ")
    assert last_line is None or last_line in rest.decode()
    assert rest.count(b"\n") == bool(why), "one line, the last"
    assert errors == bare.stderr
    assert seen.returncode == bare.returncode
    [folder] = run_folders(tmp_path)
    kept = (folder / "output.log").read_bytes().replace(why + rest, b"")
    shown = [line for line in (bare.stdout + b"\n" + bare.stderr).splitlines() if line]
    # What child processes print goes past it.
    shown = [line for line in shown if not line.startswith(b"imported as ")]
    assert sorted(filter(None, kept.splitlines())) == sorted(shown)
    return read_run(folder)


@dataclass
class Captured:
    """A finished watched run: what the script printed, and what its folder holds."""

    said: list[dict[str, Any]]
    folder: Path

    @property
    def run_json(self) -> dict[str, Any]:
        return read_run(self.folder).run_json

    def spoken(self, key: str) -> list[float]:
        return [line[key] for line in self.said if key in line]

    def recorded(self, key: str) -> list[float]:
        return metric(self.folder, key).tolist()  # type: ignore[no-any-return]

    def samples(self) -> list[float]:
        """Return the samples of each step but the first, which has no time."""
        rates, times = (
            metric(self.folder, f"perf/{key}") for key in ("samples_per_sec", "step_time")
        )
        return (rates * times).tolist()  # type: ignore[no-any-return]


def watch(runs: Path, script: str, *arguments: str) -> Captured:
    """Run the script under watch to its end."""
    words = ("-m", "stepscope.watch", str(SCRIPTS / script), *arguments)
    done = run_python(*words, STEPSCOPE_RUNS=str(runs), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    [folder] = run_folders(runs)
    assert read_run(folder).status is RunStatus.FINISHED, done.stderr
    assert "will be missing" not in done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return Captured(said, folder)
