"""The NVML simulator, compiled from its sources, under programs of their own.

`ask` runs a program with the library in the place of NVIDIA's and returns the JSON of its last
line. The program finds a sampler on an injected clock (`HEAD`), so seconds cost nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "simulator"
BUILDS = SIMULATOR / "build"  # a folder for each version of torch, all with the same nvml.h
INCLUDE = Path(os.environ.get("CUDASIM_BUILD") or next(BUILDS.glob("*/"), BUILDS)) / "include"
TIMEOUT_S = 60

HEAD = """
import ctypes, json, os, pathlib, sys, time
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import open_source
from stepscope.session.sampler import Sampler
from tests.support.fake_nvml import FakeClock
from tests.support.fake_recorder import FakeRecorder

clock, recorder = FakeClock(), FakeRecorder()
source = open_source(clock)
uuids = [info.uuid for info in source.devices()]
sampler = Sampler(recorder, allocator_index=None, source=source, clock=clock)
library = ctypes.CDLL("libnvidia-ml.so.1")
library.cudasim_nvml_counts.restype = ctypes.c_char_p

def ticks(number):
    for _ in range(number):
        sampler.tick()
        clock.now += 0.1

def counts():
    return json.loads(library.cudasim_nvml_counts())

def steer(*lines):
    path = pathlib.Path(os.environ["CUDASIM_NVML"])
    new = path.with_suffix(".new")
    new.write_text("\\n".join(lines) + "\\n")
    new.replace(path)

def tell(**found):
    print(json.dumps(found))
"""


def no_header() -> str | None:
    """Say why the library cannot be compiled; None where it can."""
    if (INCLUDE / "nvml.h").exists():
        return None
    return f"nvml.h is not in {INCLUDE}: simulator/setup.sh fetches it"


def build(folder: Path, *flags: str) -> Path:
    """Compile the library into a folder; return its path."""
    library = folder / "libnvidia-ml.so.1"
    sources = sorted(str(path) for path in (SIMULATOR / "src").glob("nvml*.c"))
    command = ["gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-fvisibility=hidden", *flags]
    command += [f"-I{INCLUDE}", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), *sources]
    subprocess.run([*command, "-lpthread"], check=True, timeout=TIMEOUT_S)
    return library


def ask(library: Path, folder: Path, program: str, **env: str) -> Any:
    """Run a program after `HEAD`, with a state of its own; return what it told."""
    own = {"LD_PRELOAD": str(library), "CUDASIM_SHM": str(folder / "shared"), "CUDASIM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **own, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
