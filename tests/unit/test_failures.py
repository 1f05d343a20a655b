"""Failures in words: what happened and what to do."""

from __future__ import annotations

import pytest
import torch

from trainer.failures import NanLoss, explain


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …"),
            "oom",
            ["Tried to allocate 2.50 GiB", "batch_size"],
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when …"), "oom", ["GPU"]),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for …"), "oom", ["GPU"]),
        (RuntimeError("GET was unable to find an engine to execute this computation"),
         "oom", ["GPU"]),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "oom",
            ["host"],
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"),
            "error",
            ["12, 13", "num_workers"],
        ),
        (
            RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "),
            "error",
            ["process 12", "num_workers"],
        ),
        (
            RuntimeError("DataLoader worker (pid 9) is killed by signal: Bus error. It is "
                         "possible that dataloader's workers are out of shared memory."),
            "error",
            ["/dev/shm"],
        ),
        (NanLoss("The loss is nan."), "error", ["The loss is nan."]),
        (KeyError("x"), "error", ["KeyError", "traceback"]),
    ],
)  # fmt: skip
def test_a_failure_is_one_sentence_and_a_remedy(
    error: Exception, kind: str, words: list[str]
) -> None:
    failure = explain(error)
    assert failure.kind == kind
    assert not failure.fatal
    for word in words:
        assert word in failure.reason


def test_a_cuda_error_needs_a_new_process() -> None:
    failure = explain(
        torch.AcceleratorError("CUDA error: an illegal memory access\nlaunch blocking")
    )
    assert failure.fatal
    assert "restart" in failure.reason
    assert "illegal memory access" in failure.reason
    assert "launch blocking" not in failure.reason
