"""A poll's answer carries the verdict of the run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from dashboard.run_analyzer import RunAnalyzer
from dashboard.services import Services
from dashboard.verdicts import find
from stepscope.distributed.hangs.record import hang_name, read_record
from stepscope.memory.oom.record import OomReport
from stepscope.run import process_identity, rank_json, write_run_json
from tests.support.oom_records import PIECES
from tests.support.polls import poll, server
from tests.support.recorded_runs import recorded_run, rows, write_run
from trainer.config import RunConfig

__all__ = ["server"]

HANGS = Path(__file__).parents[1] / "data" / "hangs"


def test_our_runs_get_a_setting_scripts_words_young_runs_nothing(
    server: Services, tmp_path: Path
) -> None:
    config, environment = RunConfig().to_dict(), {"cores": 8}
    write_run(tmp_path / "own", {"config": config, "environment": environment}, steps=rows(0.06))
    told = poll("own")["verdict"]
    assert told["setting"]["text"] == "num_workers 4"
    assert len(json.dumps(told)) < 250  # twice a second
    recorded_run(tmp_path, "input_bound_cpu")
    assert "num_workers" in poll("input_bound_cpu")["verdict"]["words"]
    write_run(tmp_path / "young", steps=rows(0.06, count=10))
    assert poll("young")["verdict"] is None
    begun = tmp_path / "begun"
    begun.mkdir()
    write_run_json(begun, {"created": 1.0, "status": "finished", "heartbeat": 1.0})
    assert "verdict" not in poll("begun")  # it has no store yet


def test_an_out_of_memory_run_names_its_tab(server: Services, tmp_path: Path) -> None:
    failed = {"status": "failed", "reason": "The GPU ran out of memory: fragmentation."}
    report = asdict(OomReport(last=PIECES, ended=True))
    caught = json.dumps(report | {"ended": False})
    found = {}
    for name, content in (
        ("none", None),
        ("short", json.dumps(report)),
        ("caught", caught),
        ("damaged", "{"),
    ):
        folder = write_run(tmp_path / name, failed, steps=rows(0.06))
        if content is not None:
            (folder / "oom.json").write_text(content)
        found[name] = poll(name)["verdict"]
    told = found["short"]
    others = {found[name]["kind"] for name in ("none", "caught", "damaged")}
    assert others == {"input-bound"}
    assert (told["kind"], told["tab"]) == ("out-of-memory", "memory")
    assert "300 MiB" in told["text"]
    assert told["words"]


def test_a_job_that_hangs_says_so_while_it_does(server: Services, tmp_path: Path) -> None:
    now = time.time()
    live = {"status": "running", "heartbeat": now, "created": now - 60, "world_size": 2}
    live |= process_identity()
    folder = write_run(tmp_path / "job", {**live, "rank": 0}, steps=rows(0.06))
    write_run_json(folder, {**live, "rank": 1}, rank_json(1))
    for number in range(2):
        record = read_record(HANGS / "sleep-gloo", number)
        assert record is not None
        record = replace(record, since=now - 9, seen=now)
        (folder / hang_name(number)).write_text(json.dumps(asdict(record)))
    # Else in a thread, for which a poll does not wait.
    server.findings = RunAnalyzer(lambda run: find(run, []), "", start=lambda search: search())
    told = poll("job")["verdict"]
    assert told["kind"] == "hang"
    assert "all_reduce #81" in told["text"]
    assert "rank 1" in told["words"]
    assert len(json.dumps(told)) < 400  # twice a second
