"""The pages Runs and Compare with many runs, in milliseconds and MB; beside them peers.

`cold` reads every run folder; `warm` reads the catalog beside the runs, as a new server does. A
redraw is one run of the page's script under Streamlit's AppTest, without a browser. Of the runs,
20 have 1,000 steps of four metrics, and are compared. With `--peers`, TensorBoard and trackio have
the same number of runs (`runs_page_peer.py`): up to 20 minutes more.

    python -m benchmarks.runs_page [--runs 10000] [--searches 20] [--peers]
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from streamlit.testing.v1 import AppTest

from benchmarks.long_runs import write_ours
from benchmarks.peers.environment import prepare
from benchmarks.reader import ChildError, child
from benchmarks.report import at_most, report, say
from benchmarks.run_list import DAY_S, timed
from dashboard.run_catalog import RunCatalog, matching
from stepscope.run import process_identity, read_run, write_run_json
from stepscope.run.folder import folder_name

QUERIES = ("sweep", "lr<0.01", "val/loss<0.3 status=finished", "group=sweep_3 tag1")
COMPARED, STEPS = 20, 1_000
PEERS = ("tensorboard", "trackio")
PAGE = Path(__file__).resolve().parents[1] / "dashboard" / "main.py"


def make_runs(root: Path, count: int) -> None:
    """Write ended runs with 20 settings and 4 final metrics each; the newest ones have steps."""
    now = time.time()
    for number in range(count):
        began = now - (count - number) * DAY_S / 100
        folder = root / folder_name(began, "run", f"{number:08x}")
        folder.mkdir()
        if number >= count - COMPARED:
            write_ours(folder, STEPS)
        config = {"lr": 0.1 / (1 + number % 50), "model": f"net{number % 7}"}
        config |= {f"setting_{index}": number * index % 17 for index in range(18)}
        keys = ("train/loss", "val/loss", "val/accuracy", "eval/f1")
        final = {key: {"last": (number % 97) / 97, "best": 0.01} for key in keys}
        about = {"name": f"run {number}", "status": "finished", "kind": "init", "step": 1000}
        about |= {"created": began, "heartbeat": began + 60, "ended": began + 60, "config": config}
        about |= {"group": f"sweep_{number % 9}", "tags": [f"tag{number % 5}"], "pid": 2**22 + 1}
        values = {"steps": 1000, "samples_per_s": 900.0, "peak_allocated": 2e9}
        run_json = process_identity() | about | {"final": final, "totals": values}
        write_run_json(folder, run_json, durable=False)


def peers(runs: int) -> dict[str, Any]:
    """Return the results of the peers, or why there is none."""
    found, room = {}, prepare()
    for name in PEERS:
        say(f"{name}: {runs:,} runs")
        with tempfile.TemporaryDirectory() as folder:
            words = (name, folder, str(runs), str(COMPARED), str(STEPS))
            try:
                result = child(room, Path(folder), "runs_page_peer", *words, timeout_s=900)
            except ChildError as error:
                result = {"reason": room.missing.get(name, str(error))}
        found[name] = {"version": room.versions.get(name)} | result
    return found


def redraw(app: AppTest) -> None:
    """Draw the page once more; fail if that fails."""
    app.run(timeout=120)
    assert not app.exception, app.exception


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--searches", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="measure TensorBoard and trackio")
    options = parser.parse_args()
    load, process = os.getloadavg()[0], psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "runs"
        root.mkdir()
        say(f"writing {options.runs:,} run folders")
        make_runs(root, options.runs)
        time.sleep(3)  # recent modification times are not trusted
        found = {"cold": timed(lambda: RunCatalog(root).rows(check=True), 1)}
        before = process.memory_info().rss
        catalog = RunCatalog(root)
        found["warm"] = timed(lambda: catalog.rows(check=True), 1)
        memory = (process.memory_info().rss - before) / 2**20
        found["check"] = timed(lambda: catalog.rows(check=True), options.searches)
        found["tick"] = timed(lambda: catalog.rows(check=False), options.searches)
        rows = catalog.rows(check=False)
        for query in QUERIES:
            search = functools.partial(matching, rows, query)
            found[f"search {query}"] = timed(search, options.searches)
        found["open"] = timed(lambda: read_run(root / rows[0].id), options.searches)
        size = sum(path.stat().st_size for path in root.iterdir() if path.is_file()) / 2**20
        os.environ["STEPSCOPE_RUNS"] = str(root)
        app = AppTest.from_file(str(PAGE), default_timeout=120).run()
        app.switch_page("views/runs.py")
        found["page"] = timed(lambda: redraw(app), 1)
        found["page_again"] = timed(lambda: redraw(app), 5)
        app.text_input(key="search").set_value(QUERIES[2])
        found["page_searched"] = timed(lambda: redraw(app), 5)
        app.switch_page("views/compare.py")
        app.query_params["runs"] = ",".join(row.id for row in rows[:COMPARED])
        found["compare"] = timed(lambda: redraw(app), 1)
        assert len(app.multiselect(key="compare_runs").value) == COMPARED
        found["compare_again"] = timed(lambda: redraw(app), 5)
    slowest = max(
        part["wall_ms"] for name, part in found.items() if name not in ("cold", "compare")
    )
    results = {**found, "catalog_mb": size, "memory_mb": memory}
    if options.peers:
        results |= peers(options.runs)
    targets = {"slowest_warm_ms": at_most(slowest, 1000.0)}
    report("runs_page", vars(options), load, results | {"targets": targets})


if __name__ == "__main__":
    main()
