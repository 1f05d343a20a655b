"""Records the examples that an empty page offers, by the training code itself.

    make examples        (python -m examples.record, with the simulator's Python for the second)
    python -m examples.record --gpu [DIR]    only the third, on a machine with a GPU; into DIR

A process of this machine trains while this script presses the page's buttons. What names the
machine (host, user, processes, paths) is then replaced in run.json, and checkpoints are left out
for their size. No recorded value is changed. There is no NaN in the first run: it would stay in the
weights and end the training. The second one ends with a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from stepscope.run import RUN_JSON, RunStatus, read_run, write_run_json
from stepscope.store import STORE_NAME, StoreReader
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from trainer.config import LRSchedule, Precision, RunConfig, Workload, defaults
from trainer.runners import start
from trainer.training.devices import list_devices

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CPU, SIMULATED, GPU = "cpu-training", "two-simulated-gpus", "h100"
LARGEST = 1_000_000
"""Bytes of all examples together."""
TIMEOUT_S = 300.0
CPU_NOTE = (
    "Recorded on a CPU with two cores: the digits CNN resumes from a checkpoint, and each button "
    "is pressed once."
)
SIMULATED_NOTE = (
    "Recorded on two simulated GPUs (simulator/): memory accounting is that of PyTorch's CUDA "
    "build; times, utilization, power and temperature are not those of a GPU. The script "
    "examples/two_devices.py doubles its batch size until it runs out of memory."
)
GPU_NOTE = (
    "Recorded on a single {name}, with driver {driver} and torch {torch}: a GPT in bf16; each "
    "button was pressed once. The validation loss rises because the model overfits its small text."
)
BUTTONS = (
    CommandName.MARK,
    CommandName.RESET_PEAKS,
    CommandName.COLLECT_GARBAGE,
    CommandName.EMPTY_CACHE,
    CommandName.SAVE_CHECKPOINT,
)
NEUTRAL = {
    "host": "example",
    "user": "example",
    "pid": 0,
    "pid_namespace": None,
}


def record_cpu(runs: Path) -> Path:
    """Train twice on the CPU, the second time from the first one's checkpoint; return its run."""
    base = RunConfig(workload=Workload.DIGITS_CNN, lr_scheduler=LRSchedule.COSINE, num_threads=1)
    first = _train(RunConfig.from_dict({**base.to_dict(), "epochs": 2}), runs)
    resume = f"{first.name}/last.pt"
    config = RunConfig.from_dict({**base.to_dict(), "epochs": 60, "resume_from": resume})
    return _train(config, runs, every=700)


def record_simulated(runs: Path, python: Path) -> Path:
    """Run `two_devices.py` under `stepscope watch` on two simulated GPUs; return its run."""
    script = runs.parent / "two_devices.py"
    shutil.copy(HERE / script.name, script)
    simulator = {
        "CUDASIM_DEVICES": "2",
        "CUDASIM_MEMORY": "400M",
        "CUDASIM_SHM": str(runs.parent / "gpus"),
        "STEPSCOPE_RUNS": str(runs),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [python, "-m", "stepscope.watch", script.name],
        cwd=script.parent,
        env=os.environ | simulator,
        stderr=subprocess.DEVNULL,
    )
    folder = _wait_for(lambda: next(iter(runs.glob("*/run.json")), None)).parent
    _press(folder, 40, CommandName.MARK, CommandName.EMPTY_CACHE, CommandName.RESET_PEAKS)
    process.wait(TIMEOUT_S)
    return folder


def record_gpu(runs: Path) -> Path:
    """Train a GPT of 10.8 million parameters on the first GPU for 1,800 steps; return its run."""
    gpu = next(device.id for device in list_devices() if device.cuda_index is not None)
    config = replace(
        defaults(Workload.GPT, gpu),
        precision=Precision.BF16,
        width=384,
        num_layers=6,
        context_length=256,
        batch_size=64,
        epochs=1000,
        max_steps=1800,
    )
    return _train(config, runs, every=180)


def _train(config: RunConfig, runs: Path, *, every: int | None = None) -> Path:
    """Train, with a button pressed every so many steps."""
    run = start(config, runs)
    if every is not None:
        _press(run.folder, every, *BUTTONS)
    _wait_for(lambda: not run.alive())
    assert read_run(run.folder).status is RunStatus.FINISHED
    return run.folder


def _press(folder: Path, every: int, *names: CommandName) -> None:
    """Press a button every so many steps, then pause the run for two seconds."""
    _wait_for(lambda: read_run(folder).status is RunStatus.RUNNING)
    for name in (*names, CommandName.PAUSE):
        _wait_for(partial(_is_past, folder, _step(folder) + every))
        _press_one(folder, name)
    time.sleep(2.0)
    _press_one(folder, CommandName.RESUME)


def _step(folder: Path) -> int:
    return int(read_run(folder).run_json.get("step", 0))


def _is_past(folder: Path, step: int) -> bool:
    return _step(folder) >= step


def _press_one(folder: Path, name: CommandName) -> None:
    args = {"text": "a note"} if name is CommandName.MARK else {}
    asked = send_command(folder, name, args)

    def answered() -> bool:
        with StoreReader(folder) as reader:
            return any(event.data.get("command_id") == asked for event in reader.events())

    _wait_for(answered)


def _wait_for(condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    return found


def keep(run: Path, name: str, title: str, note: str) -> None:
    """Copy a run to `examples/NAME`, or an absolute path, without this machine's names."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = str(run.parent.parent)
    for file in ("output.log", "traceback.txt"):
        if (run / file).exists():
            (folder / file).write_text(neutral((run / file).read_text(), work))
    run_json = json.loads(neutral((run / RUN_JSON).read_text(), work))
    run_json |= NEUTRAL | {"name": title, "note": note}
    run_json["environment"] |= {"host": NEUTRAL["host"], "platform": platform.system()}
    write_run_json(folder, run_json)
    shutil.copy(run / STORE_NAME, folder)
    with closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as store:
        for number, text, data in store.execute("SELECT id, text, data FROM events").fetchall():
            values = (neutral(text, work), neutral(data, work), number)
            store.execute("UPDATE events SET text = ?, data = ? WHERE id = ?", values)
        store.execute("VACUUM")
    for path in folder.iterdir():
        content = path.read_bytes()
        for word in (work, str(ROOT), str(Path.home()) + "/", f'"{socket.gethostname()}"'):
            if word.encode() in content:
                raise ValueError(f"{path}: names this machine ({word}). Replace it in `neutral`.")


def neutral(text: str, work: str) -> str:
    """Return a text with paths as they are below the folder of the packages or of the script."""
    text = re.sub(r"/[^\s\"]*/(?=site-packages/|python3\.\d+/)", "", text)
    return text.replace(f"{work}/", "").replace(work, ".")


def _keep_gpu(folder: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        run = record_gpu(Path(work, "runs"))
        environment = read_run(run).run_json["environment"]
        note = GPU_NOTE.format(name=environment["gpu"], **environment)
        keep(run, folder, f"Example: GPT on an {environment['gpu'].split()[1]}", note)


def main() -> None:
    """Record both examples and put them in place of the old ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulator", type=Path, default=ROOT / ".venv-cudasim/bin/python")
    parser.add_argument(
        "--gpu", nargs="?", const=GPU, metavar="DIR", help="record the example of a GPU alone"
    )
    options = parser.parse_args()
    if options.gpu:
        _keep_gpu(str(Path.cwd() / options.gpu) if options.gpu != GPU else GPU)
        return
    with tempfile.TemporaryDirectory() as work:
        runs = Path(work, "runs")
        keep(record_cpu(runs), CPU, "Example: digits on a CPU", CPU_NOTE)
    with tempfile.TemporaryDirectory() as work:
        runs = Path(work, "runs")
        run = record_simulated(runs, options.simulator)
        keep(run, SIMULATED, "Example: two simulated GPUs", SIMULATED_NOTE)
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"examples: {size / 1024:.0f} KiB")
    if size > LARGEST:
        raise ValueError(f"examples: must be under {LARGEST} bytes together, got {size}.")


if __name__ == "__main__":
    main()
