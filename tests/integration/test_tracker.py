"""`stepscope.init()` and `stepscope.log` in processes of their own: what a script gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope.run import RunInfo, RunKind, RunStatus, read_run, run_folders
from tests.support.child_process import ROOT, run_python
from tests.support.run_values import events, metric


def script(
    runs: Path, code: str, returncode: int = 0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code with STEPSCOPE_RUNS set; the library comes from this checkout."""
    done = run_python("-c", code, cwd=cwd, STEPSCOPE_RUNS=str(runs), **environment)
    assert done.returncode == returncode, done.stderr
    return done


def only_run(runs: Path) -> RunInfo:
    (folder,) = run_folders(runs)
    return read_run(folder)


def values(runs: Path, key: str) -> list[float]:
    """The values of a metric of the only run."""
    return metric(only_run(runs).folder, key).tolist()  # type: ignore[no-any-return]


def test_steps_values_and_events_of_a_script(tmp_path: Path) -> None:
    code = """
import stepscope
rec = stepscope.init("mine", config={"depth": 2})
for epoch in (1, 2):
    rec.epoch = epoch
    for i in range(50):
        if i == 25:
            rec.step(loss=1.0 / (i + 1), lr=0.1, extra=7)
        else:
            rec.step(loss=1.0 / (i + 1), lr=0.1)
    rec.log({"val/accuracy": 90.0 + epoch}, val_loss=0.5)
rec.event("half way", note=1)
"""
    script(tmp_path, code)
    run = only_run(tmp_path)
    assert (run.status, run.run_json["kind"]) == (RunStatus.FINISHED, RunKind.INIT)
    assert (run.run_json["step"], run.run_json["epoch"], run.run_json["device"]) == (100, 2, "cpu")
    assert run.run_json["config"] == {"depth": 2}
    assert run.run_json["custom"] == ["train/extra"]
    assert values(tmp_path, "train/loss") == [1.0 / (i + 1) for i in range(50)] * 2
    assert values(tmp_path, "train/extra") == [7.0, 7.0]
    assert values(tmp_path, "val/accuracy") == [91.0, 92.0]
    assert values(tmp_path, "val/loss") == [0.5, 0.5]
    assert len(values(tmp_path, "perf/step_time")) == 99, "the first step has none"
    assert [event.text for event in events(run.folder)] == ["half way"]


def test_init_says_where_it_records(tmp_path: Path) -> None:
    code = """
import stepscope
stepscope.init("first")
stepscope.init("the same")
"""
    done = script(tmp_path, code)
    folder = only_run(tmp_path).folder
    assert str(folder) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    elsewhere = tmp_path / "their runs"
    done = script(tmp_path, f"import stepscope; stepscope.init('x', runs={str(elsewhere)!r})")
    assert f"STEPSCOPE_RUNS='{elsewhere}'" in done.stderr


def test_a_notebooks_run_has_its_name(tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["/usr/lib/python3/dist-packages/ipykernel_launcher.py", "-f", "x.json"]
import stepscope
stepscope.init()
"""
    vs_code = f"__vsc_ipynb_file__ = '/home/me/Third.ipynb'\n{code}"
    found = {}
    for name, (text, session) in {
        "jupyter": (code, "work/My model.ipynb"),
        "unknown": (code, "RTC:json:notebook:7f3"),
        "vs code": (vs_code, ""),
    }.items():
        done = script(tmp_path / name, text, JPY_SESSION_NAME=session)
        found[name] = only_run(tmp_path / name).run_json["name"]
        assert f"STEPSCOPE_RUNS='{tmp_path / name}' stepscope ui".replace("'", "") in (
            done.stderr.replace("'", "")
        )
    assert found == {"jupyter": "My model", "unknown": "notebook", "vs code": "Third"}


def test_batches_measure_wait_and_samples(tmp_path: Path) -> None:
    code = """
import numpy, stepscope
with stepscope.init() as rec:
    data = [(numpy.zeros((8, 3)), numpy.zeros(8))] * 5
    for _ in range(3):
        rec.step(loss=1.0)
    for inputs, targets in rec.batches(data):
        rec.step(loss=1.0)
    for batch in rec.batches(data):
        rec.step(loss=1.0)
"""
    script(tmp_path, code)
    assert len(values(tmp_path, "perf/data_wait")) == 10
    times = np.array(values(tmp_path, "perf/step_time"))[-10:]
    assert np.allclose(values(tmp_path, "perf/samples_per_sec"), 8 / times)
    assert "perf/samples" not in stepscope.open(only_run(tmp_path).folder).metrics


@pytest.mark.parametrize(
    ("ending", "returncode", "status", "reason"),
    [
        ("raise ValueError('no such thing')", 1, RunStatus.FAILED, "ValueError: no such thing"),
        ("raise KeyboardInterrupt", -2, RunStatus.STOPPED, "Ctrl-C"),
        ("import sys; sys.exit(3)", 3, RunStatus.FAILED, "exit code 3"),
        ("import sys; sys.exit(0)", 0, RunStatus.FINISHED, None),
    ],
)
def test_the_status_tells_how_it_ended(
    tmp_path: Path, ending: str, returncode: int, status: RunStatus, reason: str | None
) -> None:
    code = f"""
import stepscope
with stepscope.init(sample=False) as rec:
    rec.step(loss=1.0)
    {ending}
"""
    script(tmp_path, code, returncode)
    run = only_run(tmp_path)
    assert run.status is status
    assert run.reason == reason or reason in str(run.reason)
    if "ValueError" in ending:  # the same outside of a `with` block
        code = f"import stepscope; stepscope.init(runs='again').step(loss=1.0); {ending}"
        script(tmp_path, code, returncode, cwd=tmp_path)
        again = only_run(tmp_path / "again")
        assert (again.status, again.reason) == (status, reason)


def test_tensors_are_taken_as_they_are(tmp_path: Path) -> None:
    code = """
import torch, stepscope, warnings
warnings.simplefilter("error")
rec = stepscope.init()
weight = torch.nn.Parameter(torch.tensor(3.0))
for step in range(3):
    loss = (weight * 2).square().mean()
    rec.step(loss=loss, lr=torch.tensor(0.25, dtype=torch.bfloat16), grid=torch.zeros(2, 2))
"""
    done = script(tmp_path, code)
    assert values(tmp_path, "train/loss") == [36.0] * 3
    assert values(tmp_path, "train/lr") == [0.25] * 3
    assert "train/grid" not in stepscope.open(only_run(tmp_path).folder).metrics
    assert done.stderr.count("train/grid") == 1


def test_a_folder_that_cannot_be_made_does_not_stop_a_script(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    code = """
import stepscope
rec = stepscope.init()
with rec:
    for batch in rec.batches([1, 2]):
        rec.step(loss=1.0)
    rec.log(a=1); rec.event("x"); rec.epoch = 3
print(rec.folder)
"""
    done = script(blocked, code)
    assert done.stdout == "None\n"
    assert str(blocked) in done.stderr


def test_threads_and_changing_names_lose_nothing(tmp_path: Path) -> None:
    code = """
import threading, stepscope
rec = stepscope.init(sample=False)
def work(number):
    for i in range(1000):
        rec.step(loss=1.0, **{f"n{number}": float(i)})
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
for i in range(100):
    rec.step(loss=2.0)
    rec.step(**{"not a name": 2.0, "ring": 1.0})
    rec.step(**{"x" * 600: float(i), "half" + chr(0xD800): 1.0})
"""
    script(tmp_path, code)
    for number in range(4):
        assert values(tmp_path, f"train/n{number}") == [float(i) for i in range(1000)]
    assert values(tmp_path, "train/loss").count(2.0) == 100
    assert values(tmp_path, "train/not a name") == [2.0] * 100
    metrics = stepscope.open(only_run(tmp_path).folder).metrics
    changed = [key for key in metrics if "xxx" in key or "half" in key]
    assert (len(changed), max(map(len, changed))) == (2, 500), "each is one metric"


def test_many_runs_in_one_process_leave_nothing_open(tmp_path: Path) -> None:
    code = """
import gc, os, stepscope
def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
for trial in range(12):
    with stepscope.init(f"trial {trial}", sample=False) as rec:
        assert stepscope.init("the same run") is rec
        rec.step(loss=1.0)
    rec.step(loss=2.0)  # closed
    if trial == 3:
        before = files()
assert files() <= before, (before, files())
"""
    script(tmp_path, code)
    runs = [read_run(folder).run_json for folder in run_folders(tmp_path)]
    assert {(run["name"], run["step"]) for run in runs} == {(f"trial {i}", 1) for i in range(12)}


OPTIMIZED = """
import stepscope, torch
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(6):
    for tokens in (300, 200):
        stepscope.log(tokens=tokens, samples=4)
    (w.sum() * 2).backward()
    optimizer.step()
    if step == 4:
        stepscope.log({"val/accuracy": 90.0}, val_loss=0.5)
print("done")
"""
BY_INIT = """
import stepscope, torch
rec = stepscope.init(sample=False)
w = torch.nn.Parameter(torch.ones(3))
for step in range(6):
    w.sum().backward()  # under watch no step, as the script counts its own
    if step % 2:
        stepscope.log(tokens=500)
        rec.step(loss=1.0, samples=8)
    else:
        rec.step(loss=1.0, samples=8, tokens=500)
    if step == 4:
        stepscope.log({"val/accuracy": 90.0}, val_loss=0.5)
print("done")
"""


def run(tmp_path: Path, code: str, *how: str) -> list[Path]:
    """Run the code, bare or under watch, and return the folders of its runs."""
    path = tmp_path / "script.py"
    path.write_text(code)
    runs = str(tmp_path / "runs")
    done = run_python("-W", "error", *how, str(path), cwd=tmp_path, STEPSCOPE_RUNS=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    return list(run_folders(tmp_path / "runs"))


def test_it_does_nothing_where_nothing_records(tmp_path: Path) -> None:
    code = "import stepscope, sys; stepscope.log(val_loss=1); stepscope.log({'x/y': 2}, tokens=3)"
    code += "\nassert 'numpy' not in sys.modules and 'stepscope.tracker' not in sys.modules"
    assert run(tmp_path, f"{code}\nprint('done')") == []


WATCH = ("-m", "stepscope.watch")


@pytest.mark.parametrize(
    ("code", "how"), [(OPTIMIZED, WATCH), (BY_INIT, ()), (BY_INIT, WATCH)], ids=["", "init", "both"]
)
def test_values_and_rates_of_the_script(tmp_path: Path, code: str, how: tuple[str, ...]) -> None:
    [folder] = run(tmp_path, code, *how)
    times = metric(folder, "perf/step_time")
    assert len(times) == 5
    assert np.allclose(metric(folder, "perf/tokens_per_sec"), 500 / times)
    assert np.allclose(metric(folder, "perf/samples_per_sec"), 8 / times)
    assert metric(folder, "val/loss").tolist() == [0.5]
    assert metric(folder, "val/accuracy").tolist() == [90.0]
    assert read_run(folder).run_json.get("custom") in (None, [])
    assert read_run(folder).run_json["step"] == 6


AFTER_AN_OPTIMIZER = """
import stepscope, torch
rec = stepscope.init()
weights = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weights], lr=0.1)
for number in range(1, 7):
    weights.sum().backward()
    optimizer.step()
    rec.step(number=number)
    optimizer.zero_grad()
print("done")
"""


def test_a_step_after_that_of_an_optimizer_adds_values_to_it(tmp_path: Path) -> None:
    [folder] = run(tmp_path, AFTER_AN_OPTIMIZER, *WATCH)
    assert read_run(folder).run_json["step"] == 6
    found = stepscope.open(folder)
    rates = found.series("train/lr")
    assert rates.step[~np.isnan(rates.value)].tolist() == [1, 2, 3, 4, 5, 6]
    numbers = found.series("train/number")
    given = ~np.isnan(numbers.value)
    assert numbers.step[given].tolist() == numbers.value[given].tolist() == [1, 2, 3, 4, 5, 6]


IN_A_CHILD = """
import multiprocessing, stepscope

def work():
    stepscope.init(sample=False).step(loss=1.0)
    {end}

if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work)
    try:
        raise KeyError("of the parent, which handles it")
    except KeyError:
        child.start()
    child.join()
    print("done")
"""


@pytest.mark.parametrize(
    ("method", "end", "status"),
    [
        ("fork", "", RunStatus.FINISHED),
        ("spawn", "", RunStatus.FINISHED),
        ("fork", "raise ValueError", RunStatus.FAILED),
    ],
)
def test_a_run_in_a_child_process_ends_as_it_does(
    tmp_path: Path, method: str, end: str, status: RunStatus
) -> None:
    """Forked processes skip atexit handlers."""
    [folder] = run(tmp_path, IN_A_CHILD.format(method=method, end=end))
    assert read_run(folder).status is status
