"""What `stepscope doctor` finds on a machine."""

from __future__ import annotations

import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import doctor, main
from stepscope.cli.doctor import CheckResult, CheckStatus, check_gpus, check_run_folder, check_torch
from stepscope.gpu.gpm import METRICS
from stepscope.gpu.source import NullSource, open_source
from tests.support.fake_machine import FakeSource, gpus
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install

CPU_TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": None, "devices": 0, "warnings": []}
CUDA_TORCH = {**CPU_TORCH, "cuda": "13.0", "devices": 1}
BLIND_TORCH = {**CUDA_TORCH, "devices": 0, "warnings": ["driver too old"]}
NO_DRIVER = NullSource("There is no driver.", retry_at=5.0)


@pytest.fixture(autouse=True)
def no_device_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without /dev/nvidiactl, with torch that has no CUDA."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and path.name != "nvidiactl")
    monkeypatch.setattr(doctor, "import_torch", lambda: CPU_TORCH)
    monkeypatch.setattr(doctor, "open_source", lambda: NO_DRIVER)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_exit_code_and_the_json_follow_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "not" / "yet"))
    assert main(["doctor"]) == 0
    capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("STEPSCOPE_RUNS", "/proc/stepscope")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    marks = {finding["what"]: finding["mark"] for finding in report["findings"]}
    assert (marks["Python"], marks["run folder"], marks["torch"]) == ("ok", "broken", "ok")


def test_a_full_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_run_folder(tmp_path).mark is CheckStatus.OK
    usage = types.SimpleNamespace(free=2**28)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    found = check_run_folder(tmp_path)
    assert (found.mark, "256 MiB free" in found.detail) == (CheckStatus.BROKEN, True)


@pytest.mark.parametrize(
    ("torch", "gpus", "visible", "mark", "text"),
    [
        (None, 1, None, CheckStatus.MISSING, "not installed"),
        ({**CUDA_TORCH, "version": "2.5.1"}, 1, None, CheckStatus.MISSING, "2.5.1"),
        ({"version": "2.13", "error": "no libcudnn"}, 0, None, CheckStatus.BROKEN, "no libcudnn"),
        (CPU_TORCH, 0, None, CheckStatus.OK, "without CUDA"),
        (CPU_TORCH, 1, None, CheckStatus.BROKEN, "without CUDA"),
        (BLIND_TORCH, 0, None, CheckStatus.MISSING, "no GPU"),
        (BLIND_TORCH, 1, None, CheckStatus.BROKEN, "driver too old"),
        (BLIND_TORCH, 1, "-1", CheckStatus.MISSING, "hides"),
    ],
)
def test_torch_is_compared_with_the_driver(
    torch: dict[str, Any] | None,
    gpus: int,
    visible: str | None,
    mark: CheckStatus,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    *_, found = check_torch(torch, gpus=gpus)
    assert found.mark is mark
    assert text in found.detail


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
    _, found = check_gpus(lambda: open_source(clock), has_cuda=False)
    assert found.mark is CheckStatus.OK
    reasons = "gpu/power_limit (permission), gpu/energy (not supported on this GPU)"
    assert set(found.detail.partition("without ")[2].split(", ")) == set(reasons.split(", "))


def test_a_lost_gpu_is_broken_and_one_without_values_too() -> None:
    lost, silent, good = gpus(3)
    lost.lost = "it has fallen off the bus"
    silent.values = {}
    found = check_gpus(lambda: FakeSource([lost, silent, good]), has_cuda=False)
    marks = [one.mark for one in found]
    assert marks == [CheckStatus.OK, CheckStatus.BROKEN, CheckStatus.BROKEN, CheckStatus.OK]
    assert "fallen off the bus" in found[1].detail


def test_a_driver_that_should_work_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark_of(source: NullSource, has_cuda: bool = False) -> CheckResult:
        (found,) = check_gpus(lambda: source, has_cuda=has_cuda)
        return found

    assert mark_of(NO_DRIVER).mark is CheckStatus.MISSING
    assert mark_of(NullSource("restart")).mark is CheckStatus.BROKEN, "it will not pass"
    assert mark_of(NO_DRIVER, has_cuda=True).mark is CheckStatus.BROKEN
    broken = NullSource("never")
    broken.devices = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert "ZeroDivisionError" in mark_of(broken).detail
    release = threading.Event()
    broken.devices = release.wait  # type: ignore[assignment, method-assign]
    monkeypatch.setattr("stepscope.cli.DRIVER_TIMEOUT_S", 0.01)
    assert "did not answer" in mark_of(broken).detail
    release.set()


def test_a_torch_that_cannot_be_imported_is_named_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudnn.so.9 is missing' >&2\nexit 1\n")
    python.chmod(0o755)
    found = doctor.import_torch(str(python))
    assert found is not None
    assert found["error"] == "ImportError: libcudnn.so.9 is missing"
    monkeypatch.setattr(doctor, "TORCH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor, "_IMPORT_TORCH", "import time; time.sleep(60)")
    assert "no answer within" in (doctor.import_torch(sys.executable) or {})["error"]


def test_an_alerts_file_that_has_no_effect_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text('[command]\nargv = ["logger"]\n')
    path.chmod(0o600)
    monkeypatch.setenv("STEPSCOPE_ALERTS", str(path))
    assert doctor.check_alerts().mark is CheckStatus.OK
    path.chmod(0o666)
    assert doctor.check_alerts().mark is CheckStatus.BROKEN
