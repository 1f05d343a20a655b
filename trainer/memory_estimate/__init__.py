"""Prediction of the peak memory of a run: `python -m trainer.memory_estimate`."""

from trainer.config_validation import TrainDevice

ABSENT = "GPU-absent"  # The device of `--device cuda` on a machine without a usable GPU.
ABSENT_GPU = TrainDevice(
    id=ABSENT,
    name="a CUDA GPU that is not in this machine",
    memory_total=0,
    cuda_index=0,
    compute_capability=(9, 0),
)
