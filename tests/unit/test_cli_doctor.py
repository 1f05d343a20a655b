"""What `stepscope doctor` says of a machine, and that looking at one leaves no trace."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import doctor, main
from stepscope.cli.doctor import (
    CheckResult,
    CheckStatus,
    GpuProbe,
    MachineProbe,
    ask_nvml,
    ask_torch,
    findings,
    try_recording,
)
from stepscope.gpu.gpm import METRICS
from stepscope.gpu.source import NullSource, open_source
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install

GIB = 2**30
CPU_TORCH = {"version": "2.13.0", "cuda": None, "available": False, "devices": [], "warnings": []}
CUDA_TORCH = {**CPU_TORCH, "cuda": "13.0", "available": True, "devices": ["H100"]}
BLIND_TORCH = {**CUDA_TORCH, "available": False, "devices": [], "warnings": ["driver too old"]}
H100 = GpuProbe(
    uuid="GPU-a",
    name="H100",
    nvml_index=0,
    memory_total=80 * GIB,
    driver_version="580.95",
    mig=False,
    read=10,
)
NO_DRIVER = "No NVIDIA driver library was found."

SOFTWARE: dict[str, Any] = {"python": "3.11.7", "executable": "/usr/bin/python"}
SOFTWARE |= {"version": "0.1.0", "torch": CPU_TORCH}
HOST: dict[str, Any] = {"runs": "/data/runs", "free": 50 * GIB, "shared_memory": 8 * GIB}
NO_GPU: dict[str, Any] = {"nvml_reason": NO_DRIVER, "nvml_broken": False, "device_nodes": False}
UNSET = ["recording_error", "driver", "visible_devices", "page"]
BARE = MachineProbe(**dict.fromkeys(UNSET), **SOFTWARE, **HOST, **NO_GPU, gpus=())
WITH_GPU = dataclasses.replace(
    BARE, nvml_reason=None, driver="580.95", gpus=(H100,), torch=CUDA_TORCH, device_nodes=True
)


def judged(machine: MachineProbe, what: str, **changes: Any) -> CheckResult:
    """Return the finding of this name, for the machine with these changes."""
    found = {one.what: one for one in findings(dataclasses.replace(machine, **changes))}
    return found[what]


def marks(machine: MachineProbe) -> set[CheckStatus]:
    return {finding.mark for finding in findings(machine)}


def test_a_machine_without_a_gpu_is_in_order() -> None:
    assert marks(BARE) == {CheckStatus.OK, CheckStatus.MISSING}
    assert judged(BARE, "torch", torch=BLIND_TORCH).mark is CheckStatus.MISSING, "a CUDA build"
    driver = judged(BARE, "NVIDIA driver")
    assert (driver.mark, str(driver)[:16]) == (CheckStatus.MISSING, "–   NVIDIA drive")
    assert NO_DRIVER.rstrip(".") in driver.detail


def test_a_machine_with_all_parts_has_nothing_to_say_against() -> None:
    assert marks(WITH_GPU) == {CheckStatus.OK}
    assert "80.0 GiB" in judged(WITH_GPU, "GPU 0").detail
    assert judged(WITH_GPU, "torch").detail == "2.13.0, built for CUDA 13.0; sees 1 of 1 GPU"


def test_a_torch_outside_the_range_is_named_and_nothing_is_broken() -> None:
    for version in ("2.5.1", "3.0.0+cu140"):
        found = judged(WITH_GPU, "torch version", torch={**CUDA_TORCH, "version": version})
        assert found.mark is CheckStatus.MISSING
        assert version in found.detail
        assert "2.6 to 2.15" in found.remedy
    assert judged(WITH_GPU, "torch").mark is CheckStatus.OK
    names = {one.what for one in findings(dataclasses.replace(WITH_GPU, torch=None))}
    assert "torch version" not in names


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"recording_error": "Permission denied"}, "run folder", "Permission denied"),
        ({"free": GIB // 4}, "run folder", "256 MiB free"),
        ({"nvml_broken": True}, "NVIDIA driver", NO_DRIVER[:-1]),
        ({"device_nodes": True}, "NVIDIA driver", "/dev/nvidiactl"),
        ({"torch": CUDA_TORCH}, "NVIDIA driver", "torch sees a GPU"),
        ({"torch": {"version": "2", "error": "no libcudnn"}}, "torch", "no libcudnn"),
    ],
)
def test_what_should_work_and_does_not_is_broken(
    changes: dict[str, Any], what: str, said: str
) -> None:
    found = judged(BARE, what, **changes)
    assert found.mark is CheckStatus.BROKEN
    assert said in found.detail


@pytest.mark.parametrize(
    ("changes", "mark", "said", "remedy"),
    [
        ({"torch": CPU_TORCH}, CheckStatus.BROKEN, "without CUDA", "CUDA build"),
        ({"torch": BLIND_TORCH}, CheckStatus.BROKEN, "driver too old", "for this driver"),
        ({"torch": BLIND_TORCH, "visible_devices": "-1"}, CheckStatus.MISSING, "hides", "Unset"),
        ({"torch": None}, CheckStatus.MISSING, "not installed", "record"),
        ({"gpus": (H100, H100)}, CheckStatus.OK, "sees 1 of 2 GPUs", ""),
    ],
)
def test_torch_is_judged_against_the_driver(
    changes: dict[str, Any], mark: CheckStatus, said: str, remedy: str
) -> None:
    found = judged(WITH_GPU, "torch", **changes)
    assert found.mark is mark
    assert said in found.detail
    assert remedy in found.remedy


def test_each_missing_metric_is_said_with_its_reason() -> None:
    missing = {"gpu/power": "permission", "gpu/energy": "not supported on this GPU"}
    gpu = dataclasses.replace(H100, missing=missing)
    found = judged(WITH_GPU, "GPU 0", gpus=(gpu,))
    assert found.mark is CheckStatus.OK
    assert "gpu/power (permission), gpu/energy (not supported on this GPU)" in found.detail
    assert "administrator" in found.remedy
    lost = dataclasses.replace(H100, lost="lost: reset required")
    assert judged(WITH_GPU, "GPU 0", gpus=(lost,)).mark is CheckStatus.BROKEN
    mig = dataclasses.replace(H100, mig=True)
    assert "MIG is on" in judged(WITH_GPU, "GPU 0", gpus=(mig,)).detail


def test_optional_parts_are_missing() -> None:
    assert judged(BARE, "/dev/shm", shared_memory=64 * 2**20).mark is CheckStatus.MISSING
    assert judged(BARE, "page", page="streamlit is not installed.").mark is CheckStatus.MISSING


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_and_the_json_follow_the_findings(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dataclasses.replace(BARE, recording_error="Read-only file system" if code else None)
    monkeypatch.setattr(doctor, "survey", lambda root: machine)
    assert main(["doctor"]) == code
    assert ("✗   run folder" in capsys.readouterr().out) == (code == 1)
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert report["facts"]["runs"] == "/data/runs"
    python = {"mark": "ok", "what": "Python", "detail": "3.11.7 (/usr/bin/python)", "remedy": ""}
    assert report["findings"][0] == python


# --- looking ------------------------------------------------------------------------------------


def test_recording_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert try_recording(tmp_path / "not" / "yet") is None
    assert list(tmp_path.iterdir()) == []
    assert try_recording(Path("/proc/stepscope")), "a folder that takes no run"


def test_nvml_is_asked_for_every_metric_and_why_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()

    def wait(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(doctor.time, "sleep", wait)
    errors = {"nvmlDeviceGetTotalEnergyConsumption": 3, "nvmlDeviceGetEnforcedPowerLimit": 4}
    activity = dict.fromkeys(METRICS, 1.0)
    gpu = FakeGpu("GPU-a", errors=errors, field_errors={83: 3}, activity=activity)
    install(monkeypatch, FakeNvml(gpu))
    answer = ask_nvml(open_source(clock))
    assert (answer["nvml_reason"], answer["driver"]) == (None, "580.95.05")
    (found,) = answer["gpus"]
    reasons = {"gpu/energy": "not supported on this GPU", "gpu/power_limit": "permission"}
    assert found.missing == reasons
    assert found.read > 5


def test_an_error_of_the_drivers_library_leaves_the_other_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ask_nvml(NullSource("restart"))["nvml_broken"] is True, "it will not pass"
    assert ask_nvml(NullSource("no driver", retry_at=5.0))["nvml_broken"] is False
    broken = NullSource("never")
    broken.devices = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    answer = ask_nvml(broken)
    assert (answer["nvml_broken"], answer["gpus"]) == (True, ())
    assert "ZeroDivisionError" in answer["nvml_reason"]
    release = threading.Event()
    broken.devices = release.wait  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(doctor, "NVML_TIMEOUT_S", 0.01)
    answer = ask_nvml(broken)
    release.set()
    assert "did not answer" in answer["nvml_reason"]


def test_a_torch_that_cannot_be_imported_is_told_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudnn.so.9 is missing' >&2\nexit 1\n")
    python.chmod(0o755)
    found = ask_torch(str(python))
    assert found is not None
    assert found["error"] == "ImportError: libcudnn.so.9 is missing"
    monkeypatch.setattr(doctor, "TORCH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor, "_ASK_TORCH", "import time; time.sleep(60)")
    assert "no answer within" in (ask_torch(sys.executable) or {})["error"]
    monkeypatch.setattr(doctor, "installed_torch", lambda: None)
    assert ask_torch() is None


def test_the_alerts_file_is_said_with_what_is_wrong_and_without_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text('[command]\nargv = ["logger"]\n[webhook]\nurl = "https://example.com/T0KEN"\n')
    path.chmod(0o600)
    monkeypatch.setenv("STEPSCOPE_ALERTS", str(path))
    found = judged(BARE, "alerts", alerts=doctor.alerts_file())
    told = "delivered to the command logger and the webhook https://example.com/…"
    assert (found.mark, found.detail) == (CheckStatus.OK, f"{path}; 7 rules, {told}")
    assert "T0KEN" not in json.dumps(doctor.alerts_file())
    path.chmod(0o666)
    found = judged(BARE, "alerts", alerts=doctor.alerts_file())
    assert found.mark is CheckStatus.BROKEN
    assert "can be written by others" in found.detail
    monkeypatch.setenv("STEPSCOPE_ALERTS", "off")
    assert "switched off" in judged(BARE, "alerts", alerts=doctor.alerts_file()).detail
