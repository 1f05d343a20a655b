"""Many runs in TensorBoard or trackio, for `runs_page.py`: write, list, and read 20 of them.

    python -m benchmarks.runs_page_peer NAME FOLDER RUNS COMPARED STEPS

Of RUNS runs, COMPARED have STEPS steps and the others one; each step has four scalars. TensorBoard
is its server over HTTP, from its start on; trackio the functions of its storage that its page
calls, in this process. Prints one JSON line: milliseconds and MB of resident memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from benchmarks.long_runs import KEYS, values, write_tensorboard
from benchmarks.peers.adapters import PROJECT
from tests.support.server import free_port

LIMIT_S = 300
"""Of the time until TensorBoard lists all runs."""


def name_of(number: int) -> str:
    """Return the name of a run."""
    return f"run_{number:05}"


def tensorboard(folder: Path, lengths: list[int]) -> dict[str, Any]:
    """Write event files, and ask a server of them as the page TIME SERIES does."""
    began = time.perf_counter()
    for number, steps in enumerate(lengths):
        write_tensorboard(folder / "events" / name_of(number), steps)
    found: dict[str, Any] = {"write_s": time.perf_counter() - began}
    port = free_port()
    url = f"http://localhost:{port}/data/"
    command = ("-m", "tensorboard.main", "--logdir", str(folder / "events"), "--port", str(port))
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL) as server:
        process = psutil.Process(server.pid)
        try:
            while (listed := len(ask(f"{url}runs") or ())) < len(lengths):
                if server.poll() is not None:
                    raise RuntimeError(f"tensorboard ended with exit code {server.returncode}")
                if time.perf_counter() - began > LIMIT_S:
                    found["reason"] = f"{listed:,} of {len(lengths):,} runs after {LIMIT_S} s"
                    break
                time.sleep(0.2)
            else:
                found["list_ms"] = 1e3 * (time.perf_counter() - began)
                names = [name_of(number) for number, steps in enumerate(lengths) if steps > 1]
                began = time.perf_counter()
                for tag in KEYS:
                    form = urllib.parse.urlencode({"tag": tag, "runs": names}, doseq=True)
                    read = ask(f"{url}plugin/scalars/scalars_multirun", form.encode())
                    assert len(read or ()) == len(names)
                found["compare_ms"] = 1e3 * (time.perf_counter() - began)
            family = [process, *process.children(recursive=True)]
            found["memory_mb"] = sum(one.memory_info().rss for one in family) / 2**20
        finally:
            with suppress(psutil.NoSuchProcess):
                for one in process.children(recursive=True):
                    one.kill()
            server.kill()
    return found


def ask(url: str, form: bytes | None = None) -> Any:
    """Return the JSON of an address; None while it does not answer."""
    try:
        with urllib.request.urlopen(url, form, timeout=60) as answer:
            return json.load(answer)
    except OSError:
        return None


def trackio(folder: Path, lengths: list[int]) -> dict[str, Any]:
    """Write runs into a project in `folder`/data, and read them as its page does."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    began = time.perf_counter()
    for number, steps in enumerate(lengths):
        rows = [dict(zip(KEYS, row, strict=True)) for row in values(0, steps).T.tolist()]
        storage.bulk_log(PROJECT, name_of(number), rows, list(range(steps)))
    found: dict[str, Any] = {"write_s": time.perf_counter() - began}
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    listed = storage.get_runs(PROJECT)
    found["list_ms"] = 1e3 * (time.perf_counter() - began)
    assert len(listed) == len(lengths)
    began = time.perf_counter()
    for number, steps in enumerate(lengths):
        assert steps == 1 or len(storage.get_logs(PROJECT, name_of(number))) == steps
    found["compare_ms"] = 1e3 * (time.perf_counter() - began)
    return found | {"memory_mb": (psutil.Process().memory_info().rss - before) / 2**20}


def main() -> None:
    """Measure, and print the result."""
    name, folder, (runs, compared, steps) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    lengths = [steps] * compared + [1] * (runs - compared)
    result = (tensorboard if name == "tensorboard" else trackio)(folder, lengths)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
