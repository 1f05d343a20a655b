"""Devices: UUIDs as NVML prints them, and a CUDA that refuses to start costs only the GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trainer.training.devices import cuda_reason, gpu_uuid, list_devices

UUID = "7a3c0f1e-0000-1111-2222-333344445555"


@dataclass(frozen=True)
class Properties:
    """What torch tells about a device, as far as it is asked here."""

    name: str
    uuid: str = UUID


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (Properties("NVIDIA H200"), f"GPU-{UUID}"),
        (Properties("NVIDIA H200 MIG 1g.18gb"), f"MIG-{UUID}"),
        (Properties("NVIDIA H200", f"GPU-{UUID}"), f"GPU-{UUID}"),
    ],
)
def test_a_uuid_has_nvmls_prefix(
    properties: Properties, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert gpu_uuid(0) == expected


def test_a_cuda_that_does_not_start_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA unknown error - this may be due to …\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    reason = cuda_reason()
    assert reason is not None
    assert "CUDA unknown error" in reason
    assert "more" not in reason
    (cpu,) = list_devices()
    assert cpu.id == "cpu"
    assert cpu.reason is None
