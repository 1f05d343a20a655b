"""Devices to train on, made up."""

from __future__ import annotations

from trainer.training.config_validation import TrainDevice

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
CPU_DEVICE = TrainDevice(id="cpu", name="CPU", memory_total=2**34)
SIMULATED = TrainDevice(
    id="GPU-c0da5130-0000-4000-8000-000000000001",
    name="Simulated GPU",
    memory_total=2**31,
    cuda_index=0,
    compute_capability=(9, 0),
)


def gpu(capability: tuple[int, int] = (9, 0), reason: str | None = None) -> TrainDevice:
    return TrainDevice(
        id=GPU,
        name="GPU",
        memory_total=2**37,
        cuda_index=0,
        compute_capability=capability,
        reason=reason,
    )
