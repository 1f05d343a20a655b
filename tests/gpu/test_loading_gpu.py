"""Loading and copying on CUDA: what each switch does, and how long copies and computing take."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import SIMULATED, waiting_raises
from tests.support.run_values import metric, run_json
from tests.support.training_runs import background, save_at_step, train
from tests.support.waiting import wait_for
from trainer.config import RunConfig, Workload, defaults
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice
from trainer.training.loaders import Loader, make_loader
from trainer.workloads.task import TensorSplit

LATE_CYCLES = 20_000_000  # some 10 ms at 2 GHz
SWITCHES: list[dict[str, Any]] = [
    {"pin_memory": False, "non_blocking": False},
    {"non_blocking": False},
    {"dataset_on_device": True},
    {"num_workers": 1, "persistent_workers": False, "copy_stream": True, "prefetch_factor": 3},
    {"copy_stream": True, "gradient_accumulation_steps": 2},
    {"dataset_on_device": True, "cuda_graphs": True},
]

switches = pytest.mark.parametrize("changes", SWITCHES, ids=lambda changes: ",".join(changes))


def small(gpu: TrainDevice, **changes: Any) -> RunConfig:
    config = defaults(Workload.DIGITS_MLP, gpu.id)
    return replace(config, **{"epochs": 2, "batch_size": 1024, "num_threads": 1, **changes})


def numbers(samples: int = 2048, width: int = 1024) -> TensorSplit:
    values = torch.arange(samples)
    return TensorSplit.of(values.float().unsqueeze(1).repeat(1, width), values)


@switches
def test_a_late_gpu_still_gets_every_batch_whole(
    gpu: TrainDevice, compute: CudaAccelerator, changes: dict[str, Any]
) -> None:
    """Each step reads its batch late and frees it early: a buffer used too early is seen here."""
    split, order = numbers(), torch.randperm(2048)
    config = small(gpu, **{**changes, "batch_size": 64})
    with closing(make_loader(split, config, compute)) as loader:
        for _ in range(2):  # the second order begins while copies of the first are under way
            arrived: list[tuple[Tensor, Tensor]] = []
            torch.cuda._sleep(LATE_CYCLES)
            for inputs, targets in loader.batches(order):
                torch.cuda._sleep(LATE_CYCLES // 4)
                arrived.append((inputs.sum(dim=1), targets.clone()))
                del inputs, targets
                compute.pace()
            assert torch.equal(torch.cat([targets for _, targets in arrived]).cpu(), order)
            sums = torch.cat([sums for sums, _ in arrived]).cpu()
            assert torch.equal(sums, order.float() * 1024)


@switches
def test_every_way_trains_to_the_same_loss_and_resumes(
    gpu: TrainDevice, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and arithmetic are the same, so the losses are, to the last bit on the simulator."""
    same = {
        name: changes[name]
        for name in ("gradient_accumulation_steps", "cuda_graphs")
        if name in changes
    }
    config = small(gpu, **same)
    plain = train(tmp_path, "plain", config)
    saved = len(plain) - 4
    save_at_step(monkeypatch, saved)
    changed = replace(config, **changes)
    exact = 0.0 if SIMULATED else 1e-5
    losses = train(tmp_path, "changed", changed)
    assert np.allclose(losses, plain, rtol=exact, atol=0)
    again = replace(changed, resume_from=f"changed/step-{saved}.pt")
    resumed = train(tmp_path, "resumed", again)
    assert np.allclose(resumed, plain[saved:], rtol=exact, atol=0)
    for key in ("perf/h2d", "perf/gpu_time", "perf/gpu_wait"):
        assert len(metric(tmp_path / "changed", key)) == len(plain), key
    copies = metric(tmp_path / "changed", "perf/h2d")
    assert (copies == 0).all() if changed.dataset_on_device else (copies > 0).all()
    assert (metric(tmp_path / "changed", "perf/gpu_time") > 0).all()


@switches
def test_no_step_waits_for_the_gpu(
    gpu: TrainDevice, compute: CudaAccelerator, changes: dict[str, Any]
) -> None:
    config = small(gpu, **{**changes, "batch_size": 64})
    with closing(make_loader(numbers(), config, compute)) as loader:
        batches = loader.batches(torch.arange(2048))
        for number, _ in enumerate(batches):
            if number == 4:  # warm: handles and buffers exist now
                break
        blocks = not (config.non_blocking or config.dataset_on_device)
        with waiting_raises():
            if blocks:
                with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                    next(batches)
            else:
                for batch in batches:
                    with compute.computing():
                        batch[0].sum()
                    compute.pace()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_copies_from_page_locked_memory(
    gpu: TrainDevice,
    compute: CudaAccelerator,
    workers: int,
    pinned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, pinning = [], set()
    pin = Tensor.pin_memory

    def pin_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_pinned():
            pinning.add(threading.current_thread())
        return pin(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(
        "trainer.training.loaders._to",
        lambda batch, device, non_blocking: sent.append([x.is_pinned() for x in batch]) or batch,
    )
    config = small(gpu, pin_memory=pinned, non_blocking=pinned, num_workers=workers)
    with closing(Loader(numbers(), config, compute)) as loader:
        assert sum(len(targets) for _, targets in loader.batches(torch.arange(2048))) == 2048
    assert sent == [[pinned, pinned]] * 2
    own = threading.current_thread() in pinning
    assert (own, len(pinning)) == (pinned and not workers, int(pinned))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_worker_ends_a_run_whose_batches_a_thread_pins(
    gpu: TrainDevice, tmp_path: Path
) -> None:
    with background(small(gpu, epochs=10_000, batch_size=64, num_workers=1), tmp_path):
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 5, 60)
        for worker in multiprocessing.active_children():
            worker.kill()
        wait_for(lambda: run_json(tmp_path)["status"] == "failed", 60)
    assert (
        ". Start again; if it recurs, set num_workers to 0 and check host memory."
        in run_json(tmp_path)["reason"]
    )


@pytest.mark.parametrize("aside", [True, False])
def test_a_side_stream_copies_while_the_gpu_computes(
    gpu: TrainDevice, compute: CudaAccelerator, aside: bool
) -> None:
    loader = Loader(numbers(), small(gpu, batch_size=512, copy_stream=aside), compute)
    batches = loader.batches(torch.arange(2048))
    next(batches)  # warm
    compute.synchronize()
    torch.cuda._sleep(50 * LATE_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    _, targets = next(batches)
    copied = torch.cuda.Event()
    copied.record(loader._copies.stream or torch.cuda.current_stream())
    if aside:
        copied.synchronize()  # would wait for the computing without a stream of its own
        assert not computed.query()
    else:
        assert not copied.query()
    assert targets.tolist() == list(range(512, 1024))  # work that follows sees the batch
    assert computed.query()
