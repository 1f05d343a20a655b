"""Opens everything below a folder of runs, as page, routes and commands do.

`python -m tests.support.open_hostile INTACT_RUNS [UID]` warms up on the intact runs, becomes the
user UID, and then reads the path of one folder of runs a line from standard input. Each operation
prints a JSON line; one that hangs ends the process with its stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import streamlit as st
from starlette.testclient import TestClient

import stepscope
from app import TOKEN, app
from dashboard import services
from dashboard.charts.memory_breakdown import breakdown_of
from dashboard.crash_watch import CrashWatch
from dashboard.ranks.job_ranks import read_job
from dashboard.run_files import profiles, snapshots
from dashboard.run_list import RunList
from dashboard.run_rows import cells_of
from dashboard.sweeps import Sweeps
from stepscope.cli import main
from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.lab.folder import SweepError, read_plan, read_sweep, sweep_folder
from stepscope.memory.snapshots.open_snapshot import SnapshotError
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from stepscope.store.writer import note_end, recover_ended
from tests.support.hostile_folders import OTHER, RUN, SWEEP
from trainer.errors import RunFailedError
from trainer.training.checkpoint import read_checkpoint

AS_OWNER = {"Authorization": f"Bearer {TOKEN}"}
REFUSALS = (RunError, StoreError, SweepError, RunFailedError, SnapshotError)
"""What an operation may raise: each is one sentence."""
HANG_S = 30.0
ROUTES = (
    "/api/series",
    "/api/series?run={run}",
    "/api/series?run={run}&include_folded=1",
    "/api/window?run={run}&axis=step&from=0&to=100",
    "/api/window?run={run}&axis=time&from=0&to=2e9",
)
COMMANDS = (
    ["runs"],
    ["runs", "--json"],
    ["diagnose", "{run}"],
    ["diagnose", "{run}", "--json"],
    ["export", "{run}", "--format", "csv"],
    ["export", "{run}", "--format", "csv", "--stream", "events"],
    ["export", "{run}", "--format", "csv", "--rank", "1"],
)


def operations(root: Path, client: TestClient) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each operation by name; every path below `root` is untrusted."""
    folder = root / RUN
    for command in COMMANDS:
        words = [word.format(run=RUN) for word in command]
        yield f"stepscope {' '.join(words)}", lambda words=words: main(words)
    for route in ROUTES:
        yield route, lambda route=route: _get(client, route.format(run=RUN))
    yield "POST mark", lambda: _post(client, "mark", {"text": "x"})
    yield "POST stop", lambda: _post(client, "stop", {})
    yield "index", lambda: RunList(root).fresh()
    yield "the other run", lambda: _is_found(root)
    yield "python", lambda: _read_all(folder)
    yield "findings", lambda: findings(read_recorded(read_run(folder)))
    yield "recover", lambda: recover_ended(read_run(folder))
    yield "note end", lambda: note_end(folder, RunStatus.FAILED, "killed")
    yield "crash watch", lambda: CrashWatch(RunList(root)).check_runs()
    yield "summary", lambda: cells_of(read_run(folder), None)
    yield "files", lambda: (profiles(folder), snapshots(folder))
    yield "memory", lambda: breakdown_of(read_run(folder))
    yield "ranks", lambda: read_job(read_run(folder))
    yield "checkpoint", lambda: read_checkpoint(folder / "last.pt")
    yield "sweeps", lambda: Sweeps(root, root / "examples").list_sweeps()
    yield "sweep", lambda: read_sweep(sweep_folder(root, SWEEP))
    yield "plan", lambda: read_plan(sweep_folder(root, SWEEP))


def _get(client: TestClient, route: str) -> None:
    answer = client.get(route)
    assert answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
    json.loads(answer.text)


def _post(client: TestClient, name: str, args: dict[str, str]) -> None:
    body = {"run": RUN, "name": name, "args": args, "id": time.time_ns() % 2**50 + 1}
    answer = client.post("/api/command", json=body, headers={"Origin": "http://localhost"})
    assert answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"


def _is_found(root: Path) -> None:
    assert OTHER in [run.id for run in RunList(root).fresh().runs], "the intact run is hidden"


def _read_all(folder: Path) -> None:
    run = stepscope.open(folder)
    run.ranks, run.gpus, run.events(), run.config
    for metric in run.metrics[:5]:
        run.series(metric)


def attack(root: Path, client: TestClient, out: TextIO) -> None:
    """Do every operation on the runs below `root`, and print how each went."""
    os.environ["STEPSCOPE_RUNS"] = str(root)
    st.cache_resource.clear()
    for name, operate in operations(root, client):
        cpu, problem = time.process_time(), None
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                operate()
        except REFUSALS as error:
            problem = None if str(error) else "an error without a sentence"
        except SystemExit as error:
            problem = None if error.code in (0, 1, 2) else f"exit code {error.code}"
        except BaseException:  # noqa: BLE001 - each is reported
            problem = traceback.format_exc()
        told = {
            "name": name,
            "cpu_s": time.process_time() - cpu,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "problem": problem,
        }
        print(json.dumps(told), file=out, flush=True)
    faulthandler.cancel_dump_traceback_later()
    services.get().close()
    print(file=out, flush=True)


def serve(intact: Path, uid: int | None) -> None:
    """Attack the intact runs, become the user, then attack each folder named on standard input."""
    out = os.fdopen(os.dup(1), "w")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["STEPSCOPE_RUNS"] = str(intact)
    with TestClient(app, base_url="http://localhost", headers=AS_OWNER) as client:
        services.get().devices()
        attack(intact, client, out)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        for line in sys.stdin:
            attack(Path(line.strip()), client, out)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
