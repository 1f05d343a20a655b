"""A machine through the simulator's NVML, a C library: eight GPUs, gaps, trouble, MIG, Xid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Need
from tests.cudasim.nvml_library import ROOT, TIMEOUT_S, build, no_header

HEAD = """
import functools, json, os, pathlib, time
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import machine_json
from stepscope.gpu.source import open_source

machine = MachineMonitor(functools.partial(open_source, reader="page"))
machine.arm(True)

def look(times=1):
    for _ in range(times):
        view = machine.look()
        time.sleep(0.1)
    return machine_json(view)["devices"]

def steer(*lines):
    path = pathlib.Path(os.environ["CUDASIM_NVML"])
    new = path.with_suffix(".new")
    new.write_text("\\n".join(lines) + "\\n")
    new.replace(path)

def tell(found):
    print(json.dumps(found))
"""

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, need: Need) -> Path:
    need(no_header())
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def ask(library: Path, tmp_path: Path) -> Ask:
    """Run a program after `HEAD` with simulated GPUs of its own; return what it told."""

    def run(program: str, **env: str) -> Any:
        (tmp_path / "steering").touch()
        own = {
            "LD_PRELOAD": str(library),
            "CUDASIM_SHM": str(tmp_path / "shared"),
            "CUDASIM_NVML": str(tmp_path / "steering"),
            "CUDASIM": "0",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-c", HEAD + program],
            env=os.environ | own | env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_eight_gpus_have_every_value_or_the_reason_why_not(ask: Ask) -> None:
    devices = ask("tell(look(2))", CUDASIM_DEVICES="8")
    assert [device["index"] for device in devices] == list(range(8))
    for device in devices:
        assert device["health"] == {"level": "ok", "text": "Idle.", "signs": []}
        assert {"gpu/util", "gpu/sm_active", "gpu/pcie_tx", "gpu/energy"} <= device["values"].keys()
        assert device["missing"]["gpu/fan"] == "not supported on this GPU"
        assert device["facts"]["temp_slowdown"] == 92
        assert device["processes"] == []


def test_trouble_of_one_gpu_is_told_of_that_one(ask: Ask) -> None:
    program = """
steer("@1 throttle 64", "@1 temperature 91", "@2 recovery 1", "@3 ecc 0 2", "@4 remapped 1 0 0 0")
tell([device["health"] for device in look()])
"""
    well, hot, reset, errors, rows = ask(program, CUDASIM_DEVICES="5")
    assert well["level"] == "ok"
    assert hot["text"].startswith(
        "Thermal throttling now, by the hardware: 91 °C, slowdown at 92 °C."
    )
    assert reset == {
        "level": "critical",
        "text": "Driver: the GPU has to be reset.",
        "signs": [{"level": "critical", "text": "Driver: the GPU has to be reset."}],
    }
    assert errors["text"].startswith("2 uncorrected memory errors")
    assert (rows["level"], rows["text"][:5]) == ("notice", "1 row")


def test_what_the_driver_refuses_is_a_gap_with_its_reason(ask: Ask) -> None:
    program = """
steer("refuse nvmlDeviceGetUtilizationRates 3", "refuse nvmlGpm* 4",
      "refuse nvmlDeviceGetComputeRunningProcesses_v3 3",
      "refuse nvmlDeviceGetComputeRunningProcesses_v2 3")
tell(look(2)[0])
"""
    device = ask(program)
    assert device["missing"]["gpu/util"] == "not supported on this GPU"
    assert device["missing"]["gpu/sm_active"].startswith("permission")
    assert device["processes"] is None
    assert "WSL" in device["missing"]["processes"]
    assert device["health"]["level"] == "ok"


def test_an_xid_is_told_in_words(ask: Ask) -> None:
    program = """
from stepscope.gpu.xid import XidWatcher
look()
watch = XidWatcher(machine.source, machine.note_xid)
time.sleep(0.3)
steer("@1 xid 79")
deadline = time.monotonic() + 20
while time.monotonic() < deadline and not look()[1]["xids"]:
    pass
watch.stop()
tell([device["health"] for device in look()])
"""
    first, second = ask(program, CUDASIM_DEVICES="2")
    assert first["level"] == "ok"
    assert second["level"] == "critical"
    assert second["text"].startswith("Xid 79: the GPU has fallen off the bus, ")
