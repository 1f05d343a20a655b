"""Failures in words: what happened and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepscope.memory.oom import observer
from stepscope.run import RunStatus
from stepscope.run.status import killed_worker, outcome, split_remedy
from stepscope.store.recorder import Recorder
from tests.support.train_devices import gpu
from trainer.config import Precision, Workload, defaults
from trainer.training.error_messages import describe_failure, nan_remedy

ON_GPU = defaults(Workload.DIGITS_CNN, gpu().id)


TRIED = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …"
NO_ENGINE = "GET was unable to find an engine to execute this computation"
KILLED = "DataLoader worker (pid 9) is killed by signal: Killed. "
BUS_ERROR = (
    "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory."
)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError(TRIED), "oom", ["tried to allocate 2.50 GiB", "batch size"]),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when …"), "oom", ["GPU"]),
        (RuntimeError(NO_ENGINE), "oom", ["GPU"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom", ["host"]),
        (RuntimeError(KILLED), "error", ["worker died", "num_workers"]),
        (RuntimeError(BUS_ERROR), "error", ["/dev/shm"]),
        *(
            (error, "error", [text, ". The GPU still responds: start again, and check the trace"])
            for text in (
                "CUDA error: invalid configuration argument",
                "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            )
            for error in (RuntimeError(text), torch.AcceleratorError(f"{text}\nlaunch blocking"))
        ),
    ],
)
def test_a_failure_is_one_sentence_and_a_remedy(
    error: Exception, kind: str, words: list[str]
) -> None:
    failure = describe_failure(error, ON_GPU)
    assert (failure.failure, failure.fatal) == (kind, False)
    assert [word for word in words if word not in str(failure.reason)] == []
    assert "launch blocking" not in str(failure.reason)


def test_the_line_after_a_colon_is_part_of_the_reason() -> None:
    """The reason of a state_dict of another model ended with "in loading state_dict for Net:"."""
    error = RuntimeError('Error(s) in loading state_dict for Net:\n\tMissing key(s): "a".\n\tMore.')
    reason = str(describe_failure(error, ON_GPU).reason)
    assert 'for Net: Missing key(s): "a". See' in reason


def test_only_the_gpu_itself_says_that_it_is_lost() -> None:
    lost = "CUDA error: an illegal memory access was encountered"
    for error in (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), KeyError("x")):
        failure = describe_failure(error, ON_GPU, lost)
        assert failure.fatal
        assert "an illegal memory access was encountered. " in str(failure.reason)
        assert "Restart the server" in str(failure.reason)


def test_a_nans_advice_is_one_that_this_run_can_follow() -> None:
    fp16 = nan_remedy(replace(ON_GPU, precision=Precision.FP16))
    assert ("bf16" in fp16, "bf16" in nan_remedy(ON_GPU)) == (True, False)


def test_memory_that_cannot_be_pinned_is_not_the_gpus() -> None:
    """CUDA has one error for both; the line that raised it, or torch's thread, tells them apart."""
    pin_memory = "CUDA error: out of memory"
    with pytest.raises(torch.AcceleratorError) as caught:
        raise torch.AcceleratorError(pin_memory)
    in_thread = torch.AcceleratorError(
        "Caught AcceleratorError in pin memory thread for device 0.\nCUDA error: out of memory"
    )
    for error in (caught.value, in_thread):
        reason = describe_failure(error, ON_GPU).reason
        assert reason.startswith("The host could not page-lock more memory. ")
        assert "switch off pin_memory" in reason
        assert "page-lock" in str(outcome(error).reason)
    elsewhere = torch.AcceleratorError("CUDA error: out of memory")
    assert describe_failure(elsewhere, ON_GPU).reason.startswith("The GPU ran out of memory")


def lost_connection(error: Exception, file: str) -> Exception:
    """Return the error as a function of this file raises it."""

    def fail() -> None:
        raise error

    try:
        exec(compile("fail()", file, "exec"), {"fail": fail})
    except Exception as raised:  # noqa: BLE001 - as it was made
        return raised
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "file", "lost"),
    [
        (ConnectionResetError(104, "reset"), "/x/torch/utils/data/dataloader.py", True),
        (ConnectionResetError(104, "reset"), "/x/train.py", False),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed. "), "/x.py", True),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Aborted. "), "/x.py", False),
    ],
)
def test_a_lost_worker_is_known_by_its_connection_too(
    error: Exception, file: str, lost: bool
) -> None:
    assert killed_worker(lost_connection(error, file)) is lost


@pytest.mark.parametrize(
    ("kills", "failure", "words"),
    [
        (1, "oom", "The host ran out of memory: the kernel killed a DataLoader worker."),
        (0, "error", "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."),
        (None, "error", "Host memory may have run out"),
    ],
)
def test_a_killed_worker_is_connected_with_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int | None, failure: str, words: str
) -> None:
    monkeypatch.setattr(observer, "kills_since", lambda first: kills)
    error = RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed. ")
    recorder = Recorder(tmp_path, name="killed")
    try:
        ended = observer.OomObserver(recorder, lambda: None).with_lost_worker(error, outcome(error))
    finally:
        recorder.close(RunStatus.FAILED)
    assert ended.failure == failure
    assert words in str(ended.reason)


IN_WORKER = """Caught FileNotFoundError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/me/train.py", line 7, in __getitem__
    return open(path)
           ^^^^^^^^^^
  File "/x/site-packages/PIL/Image.py", line 3277, in open
    fp = builtins.open(filename, "rb")
FileNotFoundError: [Errno 2] No such file or directory: '/data/img_000320.jpg'
"""
NCCL = """NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            IN_WORKER,
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/img_000320.jpg', "
            "train.py:7 in __getitem__ (DataLoader worker process 0)",
        ),
        (NCCL + "Socket closed", "RuntimeError: Socket closed"),
        (NCCL, "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage, NCCL "),
        ("Caught a cold in winter.", "RuntimeError: Caught a cold in winter."),
    ],
)
def test_the_reason_is_the_line_that_matters(text: str, words: str) -> None:
    reason = outcome(RuntimeError(text)).reason or ""
    assert reason.startswith(words)
    assert split_remedy(reason) == (reason, None)


def test_the_files_of_libraries_are_not_named_as_the_users() -> None:
    reason = outcome(RuntimeError(IN_WORKER.replace("/home/me", "/x/site-packages/some"))).reason
    assert str(reason).endswith("/data/img_000320.jpg' (DataLoader worker process 0)")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("CUDA error: device-side assert triggered\nCUDA kernel errors ...", "out of range"),
        ("Cannot re-initialize CUDA in forked subprocess. To use ...", "spawn"),
        (BUS_ERROR, "--shm-size"),
        ("unable to write to file </torch_9_1_0>: No space left on device (28)", "--shm-size"),
        ("Expected to have finished reduction in the prior iteration", "find_unused_parameters"),
        (f"{NCCL}Duplicate GPU detected : rank 0 and rank 1 both on 1000", "LOCAL_RANK"),
    ],
)
def test_a_known_error_has_a_next_step_also_as_the_cause_of_another(text: str, word: str) -> None:
    other = RuntimeError("DataLoader worker (pid(s) 9) exited unexpectedly")
    other.__cause__ = RuntimeError(text)
    for error in (RuntimeError(text), other):
        reason, remedy = split_remedy(outcome(error).reason or "")
        assert word in str(remedy)
        assert word not in reason
        assert not killed_worker(error)


@pytest.mark.parametrize(
    "text",
    ["No space left on device: 'model.pt'", "CUDA error: an illegal memory access", "assert"],
)
def test_similar_errors_have_no_next_step(text: str) -> None:
    assert split_remedy(outcome(RuntimeError(text)).reason or "") == (f"RuntimeError: {text}", None)
