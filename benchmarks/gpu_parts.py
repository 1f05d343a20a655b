"""The parts of `gpu_report.py` that no other benchmark measures, each in a process of its own.

    python -m benchmarks.gpu_parts facts
    python -m benchmarks.gpu_parts tests RESULTS [PYTEST ARGUMENT …]
    python -m benchmarks.gpu_parts lab FOLDER [LAB ARGUMENT …]

`tests` appends one JSON line for each finished test to RESULTS and leaves out those that are there
already; then it runs those that failed once more, one after the other. `lab` continues the sweep of
FOLDER. All but `lab` print one JSON object as the last line.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("streamlit", "plotly", "hypothesis", "playwright")
"""What a machine with a GPU need not have; a test module that needs a missing one is left out."""
WORKERS = 4
PYTEST = ["-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-o", "addopts="]
PYTEST += ["-W", "ignore::pytest.PytestConfigWarning"]
PYTEST += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
"""Without pytest-timeout and pytest-rerunfailures the settings for them are unknown."""
RESULTS, AGAIN = "STEPSCOPE_GPU_RESULTS", "STEPSCOPE_GPU_AGAIN"
_running: dict[str, dict[str, Any]] = {}


@cache
def imports(file: Path) -> frozenset[str]:
    """Return the modules that a file imports, with the names that it takes from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


def needed(file: Path, packages: Iterable[str]) -> list[str]:
    """Return which of the packages a file imports, itself or through files of ROOT."""
    found: set[str] = set()
    seen, ahead = {file}, [file]
    while ahead:
        names = imports(ahead.pop())
        found |= {name.split(".")[0] for name in names}
        bases = [ROOT.joinpath(*name.split(".")) for name in names]
        files = {one for base in bases for one in (base.with_suffix(".py"), base / "__init__.py")}
        ahead += [one for one in files - seen if one.is_file()]
        seen |= files
    return sorted(found & set(packages))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each test; a line that was cut off is no result."""
    found = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            one = json.loads(line)
            found[one["test"]] = one
    return found


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Take the tests without a result, or `again` those that failed and have none of that."""
    done = read_results(Path(os.environ[RESULTS]))
    items[:] = [item for item in items if is_left(done.get(item.nodeid), AGAIN in os.environ)]


def is_left(one: Mapping[str, Any] | None, again: bool) -> bool:
    """Return whether a test with this result has to run, for the first time or again."""
    if not again or one is None:
        return one is None and not again
    return one["outcome"] == "failed" and "again" not in one and not lacks_gpus(one)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst of set-up, call and tear-down."""
    one = _running.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed"})
    one["seconds"] = round(one.get("seconds", 0.0) + report.duration, 3)
    if report.outcome != "passed" and one["outcome"] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else crash
        one |= {"outcome": report.outcome, "reason": str(getattr(said, "message", said))[:500]}
        one["output"] = report.longreprtext[-2000:] if report.outcome == "failed" else ""


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write the result, marked where the test ran alone because it had failed."""
    one = _running.pop(nodeid, None)
    if one is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(one | ({"again": True} if AGAIN in os.environ else {})) + "\n")


def tests(path: Path, chosen: list[str]) -> dict[str, Any]:
    """Run the tests that have no result yet, then again, one at a time, those that failed."""
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    needs = {file.name: found for file in files if (found := needed(file, missing))}
    parallel = importlib.util.find_spec("xdist") and len(os.sched_getaffinity(0)) > WORKERS
    several = ["-n", str(WORKERS), "--dist", "loadgroup"] if parallel else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--require-gpu",
        *PYTEST,
        "-p",
        "benchmarks.gpu_parts",
    ]
    command += [*(f"--ignore=tests/gpu/{name}" for name in needs), *(chosen or ["tests/gpu"])]
    for more, own in ((several, {}), ([], {AGAIN: "1"})):
        done = subprocess.run([*command, *more], env=os.environ | {RESULTS: str(path)} | own)
        if done.returncode not in (0, 1, 5):  # 5: there is none to run
            raise SystemExit(f"pytest ended with exit code {done.returncode}.")
    return {"left_out": needs, "processes": WORKERS if parallel else 1}


def lacks_gpus(one: Mapping[str, Any]) -> bool:
    """Return whether a test failed because it needs more GPUs than there are."""
    return any(text in one["reason"] for text in ("needs two GPUs", "only one GPU", "fewer than"))


def facts() -> dict[str, Any]:
    """Return the GPU, its driver, and the versions."""
    torch = importlib.import_module("torch")
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": torch.version.cuda, "cores": os.cpu_count()}
    found["gpus"] = [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        found["driver"] = nvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # noqa: BLE001 (a fact is missing, with the reason)
        found["driver"] = f"unknown: {error}"
    return found


def main() -> None:
    """Measure one part."""
    part, *rest = sys.argv[1:]
    if part == "lab":
        folder, *options = rest
        options = [] if Path(folder, "plan.json").is_file() else options
        command = [sys.executable, "-m", "trainer.lab", "--folder", folder, *options]
        os.execv(sys.executable, command)
    elif part == "tests":
        print(json.dumps(tests(Path(rest[0]).resolve(), rest[1:])))
    elif part == "facts":
        print(json.dumps(facts()))
    else:
        raise SystemExit(f"{part}: must be facts, tests or lab.")


if __name__ == "__main__":
    main()
