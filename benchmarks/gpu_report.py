"""Everything that needs a real GPU, in one command that can be called again, and its document.

    python -m benchmarks.gpu_report --out DIR [--minutes 9] [--commit SHA]
    python -m benchmarks.gpu_report --write docs/gpu/DATE-NAME.md DIR

The parts are in PARTS, most valuable first; each is one or more steps, each a child process with a
time limit of its own. DIR holds a JSON file for each part. A step that finished is not run again
when the command is called with the same DIR; one that failed or ran out of time is recorded so,
with the end of its output, and is run again after those that were never run. A step that takes
longer than what is left of the minutes is not started, a shorter one after it is.
It needs Python 3.11 with torch, pytest, numpy, psutil and nvidia-ml-py; neither Streamlit nor
Plotly nor a network. On the simulator (simulator/) the steps are shorter: their figures mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_parts import PYTEST, lacks_gpus, read_results

ROOT = Path(__file__).resolve().parents[1]
FINISHED, FAILED, OUT_OF_TIME, NOT_STARTED = "finished", "failed", "out of time", "not started"
GRACE_S = 8.0
"""For a step to end after it was interrupted, before it is killed."""
TAIL = 3000
"""Characters kept of a step's output."""
TESTS_FILE = "tests.jsonl"
NVML = "STEPSCOPE_GPU_REPORT"


@dataclass(frozen=True, slots=True)
class Step:
    """A child process: `python -m` with `command`, where {out} is the folder of the results.

    `takes_s` is what it is expected to take, and the limit twice that. Its result is the last JSON
    object of its output, or `file`, which it may also leave behind unfinished. `env` names a
    variable that holds the path of that file.
    """

    name: str
    takes_s: float
    command: Sequence[str]
    file: str = ""
    env: str = ""


def parts(short: bool) -> dict[str, list[Step]]:
    """Return the steps of each part, most valuable first; `short` for the simulator."""
    chosen_tests = ["tests/gpu/test_values_gpu.py"] if short else []
    overhead = ["benchmarks.overhead", "--device", "cuda", "--no-peers", "--placement", "free"]
    overhead += ["--quick"] if short else ["--rounds", "32"]
    tick = ["benchmarks.child", "sampler:sample", '["stepscope", 10]']
    latency = "tests/gpu/test_sampler_gpu.py::test_every_call_and_its_latency"
    loop = ["benchmarks.loop", "--device", "cuda"]
    loop += ["--pairs", "1", "--epochs", "1"] if short else ["--pairs", "5", "--epochs", "20"]
    lab = ["--device", "cuda", "--no-combination", "--max-rounds", "1" if short else "5"]
    lab += ["--steps", "2"] if short else []
    tune = ["benchmarks.tune_scripts", "--out", "{out}/tune", "--device", "cuda"]
    tune += ["--minutes", "0.5" if short else "3"]
    scripts = ["nanoGPT"] if short else ["nanoGPT", "makemore", "word_language_model"]
    presets = {"precision": 60 if short else 150, "tutorials": 200}
    return {
        "tests": [
            Step(
                "all",
                70 if short else 260,
                ["benchmarks.gpu_parts", "tests", f"{{out}}/{TESTS_FILE}", *chosen_tests],
            )
        ],
        "overhead": [
            Step("1 ms", 70, [*overhead, "--step-ms", "1"]),
            Step("10 ms", 100, [*overhead, "--step-ms", "10"]),
        ],
        "sampler": [
            Step("tick", 20, tick),
            Step("calls", 40, ["pytest", "--require-gpu", *PYTEST, latency], "nvml.json", NVML),
        ],
        "loop": [Step("digits_cnn", 50, loop)],
        "lab": [
            Step(
                f"{workload} {preset}",
                takes_s,
                [
                    *("benchmarks.gpu_parts", "lab", f"{{out}}/lab-{workload}-{preset}"),
                    *("--workload", workload, *lab, "--preset", preset),
                ],
                file=f"lab-{workload}-{preset}/sweep.json",
            )
            for preset, takes_s in presets.items()
            for workload in ("gpt", "resnet")
        ],
        "tune": [
            Step(script, 60 if short else 270, [*tune, "--only", script]) for script in scripts
        ],
        "example": [
            Step(
                "gpt",
                20 if short else 100,
                ["examples.record", "--gpu", "{out}/example"],
                file="example/run.json",
            )
        ],
    }


def todo(
    plan: Mapping[str, Sequence[Step]], records: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Step]]:
    """Return the steps that have not finished: the least often run first, then in order."""

    def runs(part: str, step: Step) -> int:
        return int(records.get(part, {}).get("steps", {}).get(step.name, {}).get("runs", 0))

    left = [
        (part, step)
        for part, steps in plan.items()
        for step in steps
        if records.get(part, {}).get("steps", {}).get(step.name, {}).get("status") != FINISHED
    ]
    return sorted(left, key=lambda one: runs(*one))


def limit_s(step: Step, left_s: float) -> float | None:
    """Return the time limit of a step with `left_s` of the budget; None: not worth starting."""
    left_s -= GRACE_S
    return min(2 * step.takes_s, left_s) if left_s >= step.takes_s else None


def add(record: Mapping[str, Any], step: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's record with a step that was run, or not started.

    One that was not started keeps what an earlier run of it has left.
    """
    before = record.get("steps", {}).get(step, {})
    runs = before.get("runs", 0)
    now = (before or found) if found["status"] == NOT_STARTED else found
    ran = found["status"] != NOT_STARTED
    steps = {**record.get("steps", {}), step: {**now, "runs": runs + ran}}
    return {**record, "steps": steps}


def part_status(record: Mapping[str, Any], steps: Iterable[Step]) -> str:
    """Return the status of a part: finished if all its steps are, else that of the first other."""
    known = record.get("steps", {})
    found = [known.get(step.name, {}).get("status", NOT_STARTED) for step in steps]
    return next((status for status in found if status != FINISHED), FINISHED)


def run_step(step: Step, out: Path, limit: float) -> dict[str, Any]:
    """Run a step for at most `limit` seconds; return its record."""
    command = [word.replace("{out}", str(out)) for word in step.command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    own = {step.env: str(out / step.file)} if step.env else {}
    began, status, reason = time.monotonic(), FINISHED, None
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = child.wait(limit)
            if code:
                status, reason = FAILED, f"exit code {code}"
        except subprocess.TimeoutExpired:
            status, reason = OUT_OF_TIME, f"ended after {limit:.0f} s"
        finally:
            _end(child)
        output.seek(0)
        text = output.read().decode(errors="replace")
    result = last_json(text) if not step.file else _read(out / step.file)
    if status == FINISHED and result is None:
        status, reason = FAILED, "no result"
    return {
        "command": " ".join(["python -m", *step.command]),
        "status": status,
        "reason": reason,
        "seconds": round(time.monotonic() - began, 1),
        "result": result,
        "tail": "" if status == FINISHED else text[-TAIL:],
    }


def last_json(text: str) -> Any:
    """Return the last line of an output that is a JSON object; None without one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child with all its processes: interrupted first, so that it can clean up."""
    try:
        processes = psutil.Process(child.pid).children(recursive=True)
    except psutil.Error:
        processes = []
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S - 2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.wait()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    waiting = path.with_suffix(".new")
    waiting.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    waiting.replace(path)


def measure(out: Path, minutes: float, commit: str) -> None:
    """Run what is left of the parts, as long as the minutes last."""
    deadline = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    short = importlib.util.find_spec("cudasim") is not None
    plan = parts(short)
    records = {part: _read(out / f"{part}.json") or {} for part in plan}
    machine = run_step(Step("facts", 30, ["benchmarks.gpu_parts", "facts"]), out, 60)
    if not (machine["result"] or {}).get("gpus"):
        raise SystemExit(f"torch finds no GPU here: {machine['tail'] or machine['result']}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    run = {"date": date, "commit": commit, "simulated": short, **machine["result"]}
    for part, step in todo(plan, records):
        limit = limit_s(step, deadline - time.monotonic())
        found: dict[str, Any] = {"status": NOT_STARTED, "result": None, "seconds": 0.0}
        if limit is None:
            found["reason"] = f"takes {step.takes_s:.0f} s; less was left"
        else:
            found = run_step(step, out, limit) | {"run": run}
        records[part] = add(records[part], step.name, found)
        if part == "tests":  # also those of a call that ran out of time
            records[part]["tests"] = list(read_results(out / TESTS_FILE).values())
        records[part] |= {"part": part, "status": part_status(records[part], plan[part])}
        _write(out / f"{part}.json", records[part])
        print(f"{part}, {step.name}: {found['status']}, {found['seconds']} s", flush=True)


def document(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the document of all parts. Raises ValueError where nothing was measured."""
    steps = [one for record in records.values() for one in record["steps"].values()]
    runs = sorted((one["run"] for one in steps if "run" in one), key=lambda run: str(run["date"]))
    if not runs:
        raise ValueError("DIR: holds no result. Run the command with --out DIR first.")
    machines = dict.fromkeys(
        f"Commit `{run['commit']}`, {', '.join(run['gpus'])}, driver {run['driver']}, torch "
        f"{run['torch']} (CUDA {run['cuda']}), Python {run['python']}, {run['cores']} cores."
        for run in runs
    )
    lines = [f"# GPU report: {runs[0]['gpus'][0]}, {runs[0]['date'][:10]}", "", *machines, ""]
    if any(run["simulated"] for run in runs):
        lines += ["**On the simulator: no figure below is that of a GPU.**", ""]
    rows: list[Sequence[Any]] = []
    for part, record in records.items():
        for name, one in record["steps"].items():
            commit = one.get("run", {}).get("commit")
            rows.append((part, name, one["status"], one["reason"], one["seconds"], commit))
    lines += table(("Part", "Step", "Status", "Reason", "Seconds", "Commit"), rows)
    for part, record in records.items():
        results = {name: one["result"] for name, one in record["steps"].items() if one["result"]}
        if part == "tests":
            lines += ["## Tests", "", *tests(record)]
        elif results:
            heads, rows_of = TABLES[part]
            found = [row for name, result in results.items() for row in rows_of(name, result)]
            lines += [f"## {part.capitalize()}", "", *table(heads, found)]
    return "\n".join(lines).rstrip() + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table and an empty one; a missing value is an empty cell."""

    def cell(value: Any) -> str:
        shown = "" if value is None else value
        if isinstance(value, float):
            shown = f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
        return " ".join(str(shown).split()).replace("|", "\\|")[:300]

    lines = [heads, ["---"] * len(heads), *rows]
    return [*("| " + " | ".join(map(cell, line)) + " |" for line in lines), ""]


def tests(record: Mapping[str, Any]) -> list[str]:
    """Return the counts of each file, the failures with their reasons, and what was left out."""
    files: dict[str, Counter[str]] = {}
    failed: list[Sequence[str]] = []
    for one in record.get("tests", []):
        outcome = str(one["outcome"])
        if outcome == "failed" and lacks_gpus(one):
            outcome = "needs more GPUs"
        elif outcome == "failed":
            failed.append((one["test"], one["reason"]))
        elif one.get("again"):
            outcome = "passed alone"
        files.setdefault(one["test"].split("::")[0], Counter())[outcome] += 1
    total = sum(files.values(), Counter[str]())
    counts = [(file, *(n[kind] for kind in total)) for file, n in [("all", total), *files.items()]]
    lines = table(("File", *total), counts)
    lines += table(("Failed", "Reason"), failed) if failed else []
    left_out = (record["steps"].get("all", {}).get("result") or {}).get("left_out", {})
    needs = [(file, ", ".join(packages)) for file, packages in left_out.items()]
    return lines + table(("Left out", "Needs"), needs) if needs else lines


Rows = Iterable[Sequence[Any]]


def _overhead(step: str, result: dict[str, Any]) -> Rows:
    free = result["free"]
    valid = "valid" if free["valid"] else "void: bare differs from bare"
    for way, found in free["seconds_to_bare"].items():
        low_high = found["interval_95"] or (None, None)
        yield step, way, free["step_ms"][way], found["median"], *low_high, found["pairs"], valid


def _sampler(step: str, result: dict[str, Any]) -> Rows:
    if step == "tick":
        yield "CPU of a tick", 1e6 * result["cpu_s"], None, None
        yield "a tick", 1e6 * result["wall_s"], None, None
        yield f"At 10 Hz: {1e3 * result['cpu_s']:.2g} % of a core", None, None, None
    for call, found in result.get("latency_us", {}).items():
        values = found if isinstance(found, dict) else {"p50": found}
        yield call, values["p50"], values.get("p99"), values.get("max")


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:+.1f} %"


def _loop(step: str, result: dict[str, Any]) -> Rows:
    for side, rate in result["samples_per_sec"].items():
        found = result["ratios"].get(side, {})
        yield step, side, rate, found.get("ratio"), found.get("spread")


def _lab(step: str, sweep: dict[str, Any]) -> Rows:
    baseline = {"name": "baseline", "text": sweep["status"], "effect": None}
    for one in ([baseline | sweep["baseline"]] if sweep["baseline"] else []) + sweep["variants"]:
        metrics = [one["metrics"].get(key) for key in ("samples_per_sec", "peak_allocated")]
        yield step, one["name"], one["text"], _percent(one["effect"]), one["rounds"], *metrics


def _tune(_: str, result: dict[str, Any]) -> Rows:
    for name, one in result["scripts"].items():
        tuned, patched = one.get("tune") or {}, one.get("patched", {})
        found = (one.get("reason"), *(tuned.get(key) for key in ("effect", "low", "high")))
        yield name, " + ".join(tuned.get("settings", ())), *found, patched.get("effect")


def _example(_: str, run: dict[str, Any]) -> Rows:
    yield run["name"], run["status"], run.get("step"), run["note"]


TABLES: dict[str, tuple[Sequence[str], Callable[[str, dict[str, Any]], Rows]]] = {
    "overhead": (("Step", "Way", "ms", "To bare", "from", "to", "Pairs", "Run"), _overhead),
    "sampler": (("µs of", "Median", "99 %", "Most"), _sampler),
    "loop": (("Workload", "Loop", "Samples/s", "Ours to it", "Spread"), _loop),
    "lab": (("Workload", "Variant", "Verdict", "Effect", "Rounds", "Samples/s", "Peak"), _lab),
    "tune": (("Script", "Settings", "Reason", "Factor", "from", "to", "Patch: factor"), _tune),
    "example": (("Run", "Status", "Steps", "Note"), _example),
}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure, or write the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time budget (9)")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    parser.add_argument("--write", nargs=2, type=Path, metavar=("FILE", "DIR"))
    options = parser.parse_args()
    if options.write:
        path, folder = options.write
        found = {part: _read(folder / f"{part}.json") for part in parts(short=False)}
        path.write_text(document({part: one for part, one in found.items() if one}), "utf-8")
    elif options.out:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the step under way ends as well
        measure(options.out.resolve(), options.minutes, options.commit or _commit())
    else:
        parser.error("give --out DIR, or --write FILE DIR")


if __name__ == "__main__":
    main()
