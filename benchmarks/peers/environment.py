"""The other recorders, and the other samplers, in virtual environments of their own.

`prepare` makes `benchmarks/.venv-peers` from `requirements.txt` (some minutes and about 1.5 GB,
once) and finds which of them can be used. All recorders, ours too, are then measured with its
Python. It sees this project's packages, torch among them, after its own. A recorder that cannot be
installed or imported is `missing` with the reason, and the benchmarks go on without it. The
samplers are in `benchmarks/.venv-samplers` (10 MB), from `samplers.txt`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import say

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 1200
PROBE_TIMEOUT_S = 120
IMPORTED = {"tensorboard": "torch.utils.tensorboard"}
"""What proves that a recorder works, where it is not the module of its own name."""


@dataclass(frozen=True, slots=True)
class Room:
    """A virtual environment and the file of what is in it."""

    venv: Path
    pins: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


RECORDERS = Room(ROOT / "benchmarks" / ".venv-peers", Path(__file__).with_name("requirements.txt"))
SAMPLERS = Room(ROOT / "benchmarks" / ".venv-samplers", Path(__file__).with_name("samplers.txt"))


@dataclass(frozen=True, slots=True)
class Peers:
    """The Python to measure with, the versions of the usable peers, why others are missing."""

    python: Path
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def without(reason: str, room: Room = RECORDERS) -> Peers:
    """Return no peers at all: ours is measured with this Python."""
    return Peers(Path(sys.executable), missing=dict.fromkeys(requirements(room), reason))


def prepare(room: Room = RECORDERS) -> Peers:
    """Make the environment if it is not there, and see which of its peers can be imported."""
    pins = requirements(room)
    try:
        failed = _install(pins, room)
    except (OSError, subprocess.SubprocessError) as error:
        return without(f"no virtual environment: {last_line(str(error))}", room)
    versions, missing = {}, {}
    for name, pin in pins.items():
        problem = failed.get(name) or _probe(IMPORTED.get(name, name), room)
        if problem is None:
            versions[name] = pin.partition("==")[2]
        else:
            missing[name] = problem
            say(f"{name} is missing: {problem}")
    return Peers(room.python, versions, missing)


def requirements(room: Room = RECORDERS) -> dict[str, str]:
    """Return the pinned requirement of each peer by its name."""
    return parse_requirements(room.pins.read_text())


def parse_requirements(text: str) -> dict[str, str]:
    """Return requirement lines by the name before `==`; comments and empty lines are none."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {line.partition("==")[0]: line for line in lines if line}


def last_line(text: str) -> str:
    """Return the last line that says something: of a traceback the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a recorder: offline, no telemetry, nothing outside `home`."""
    packages = os.environ.get("PYTHONPATH", "")  # those of a Python that nothing is installed in
    return os.environ | {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), packages))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "STEPSCOPE_RUNS": str(home / "runs"),
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRACKIO_DIR": str(home / "data"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }


def _install(pins: dict[str, str], room: Room) -> dict[str, str]:
    """Install what is not installed yet; return the reasons of those that could not be."""
    stamp = room.venv / "installed.json"
    wanted = {"pins": pins, "python": sys.version}
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if {name: known[name] for name in wanted} == wanted:
            return dict(known["failed"])
    say(f"installing {', '.join(pins.values())} into {room.venv}: some minutes, once")
    subprocess.run([sys.executable, "-m", "venv", "--clear", room.venv], check=True, timeout=300)
    failed: dict[str, str] = {}
    # All at once, so that they agree on what they share; one by one where that cannot be.
    if _pip(room, *pins.values()) is not None:
        for name, pin in pins.items():
            problem = _pip(room, pin)
            if problem is not None:
                failed[name] = problem
    _share_packages(room)
    stamp.write_text(json.dumps(wanted | {"failed": failed}, indent=1))
    return failed


def _pip(room: Room, *pins: str) -> str | None:
    """Install; return why it failed."""
    done = subprocess.run(
        [room.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return f"cannot be installed: {last_line(errors[-1] if errors else done.stderr)}"


def _share_packages(room: Room) -> None:
    """Let the environment find this one's packages (torch) behind its own."""
    (folder,) = room.venv.glob("lib/python*/site-packages")
    (folder / "stepscope-venv.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _probe(module: str, room: Room) -> str | None:
    """Import a module with the environment's Python; return why that failed."""
    try:
        done = subprocess.run(
            [room.python, "-c", f"import {module}"],
            cwd=room.venv,
            env=environment(room.venv / "home"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"cannot be imported: no answer in {PROBE_TIMEOUT_S} s"
    return None if done.returncode == 0 else f"cannot be imported: {last_line(done.stderr)}"
