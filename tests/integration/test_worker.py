"""The child process: a clean end, and no life after its parent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.run_values import run_json
from tests.support.training_runs import small, start_worker
from tests.support.waiting import wait_for
from trainer.config import Workload


def test_it_ends_by_itself_while_its_parent_lives(tmp_path: Path) -> None:
    with start_worker(small(Workload.LINEAR), tmp_path) as child:
        assert child.wait(60) == 0
    assert run_json(tmp_path)["status"] == "finished"


def test_it_stops_when_its_parent_is_gone(tmp_path: Path) -> None:
    config = replace(small(Workload.DIGITS_MLP), epochs=10_000)
    with start_worker(config, tmp_path) as child:
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 5, 60)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
    assert run_json(tmp_path)["status"] == "stopped"
