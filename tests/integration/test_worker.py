"""The child process: a clean end, and no life after its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.integration.test_training import run_json, small, wait_for
from trainer.config import RunConfig, Workload

ROOT = Path(__file__).resolve().parents[2]


def start(config: RunConfig, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer.runners.worker", str(folder)],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(config.to_dict()).encode() + b"\n")
    child.stdin.flush()
    return child


def test_it_ends_by_itself_while_its_parent_lives(tmp_path: Path) -> None:
    with start(small(Workload.LINEAR), tmp_path) as child:
        assert child.wait(60) == 0
    assert run_json(tmp_path)["status"] == "finished"


def test_it_stops_when_its_parent_is_gone(tmp_path: Path) -> None:
    config = replace(small(Workload.DIGITS_MLP), epochs=10_000)
    with start(config, tmp_path) as child:
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 5, 60)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
    assert run_json(tmp_path)["status"] == "stopped"
