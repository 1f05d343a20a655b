"""`stepscope devices` beside a program that uses the GPU: its memory, its process, its health."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.gpu.source import open_source
from trainer.devices import gpu_uuid

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
HELD = 512 * MIB
OTHER = f"""
import sys, torch
held = torch.zeros({HELD}, dtype=torch.uint8, device="cuda:0")
small = torch.randn(256, 256, device="cuda:0")
torch.cuda.synchronize()
print("ready", flush=True)
for _ in range(10_000_000):
    small = (small @ small).clamp(-1, 1)
"""


@pytest.fixture(scope="module")
def other(_cuda: None) -> Iterator[subprocess.Popen[str]]:
    """A program of this user that holds memory and computes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, "--api-token", "s3cr3t"],
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def stepscope(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.cli", "devices", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def this_gpu(found: dict[str, Any]) -> dict[str, Any]:
    uuid = gpu_uuid(0)
    (device,) = [device for device in found["devices"] if device["uuid"] == uuid]
    return dict(device)


def test_devices_as_json_show_another_process_and_its_memory(
    other: subprocess.Popen[str], need: Callable[[str | None], None]
) -> None:
    need(open_source().reason)
    device = this_gpu(json.loads(stepscope("--json")))
    values, health = device["values"], device["health"]
    total = torch.cuda.get_device_properties(0).total_memory
    assert values["gpu/mem_total"] == pytest.approx(total, rel=0.1)
    assert HELD <= values["gpu/mem_used"] <= values["gpu/mem_total"]
    assert values["gpu/util"] > 0
    assert health["level"] in ("ok", "notice", "warning")
    assert device["name"] == torch.cuda.get_device_name(0)
    missing = device["missing"]
    assert not missing.keys() & values.keys()
    assert all(missing.values()), "each gap has its reason"
    if device["processes"] is None:  # a container that hides them says so
        assert missing["processes"]
        return
    (found,) = [process for process in device["processes"] if process["pid"] == other.pid]
    assert (found["yours"], found["state"], found["kind"]) == (True, "running", "compute")
    assert found["memory"] is None or found["memory"] >= HELD
    assert "s3cr3t" not in found["command"]
