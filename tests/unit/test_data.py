"""Data: batches whole, in the order asked, repeated where an epoch is longer than the tensors."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.config import RunConfig, Strategy
from trainer.error_messages import RunFailedError
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import HostLoader, make_loader
from trainer.training.worker_pool import WorkerPool
from trainer.workloads.task import TensorSplit

ROOT = Path(__file__).resolve().parents[2]


def split(samples: int = 10, length: int | None = None) -> TensorSplit:
    values = torch.arange(samples)
    return TensorSplit(values.float().unsqueeze(1), values, length or samples)


def test_memory_batches_follow_the_order_and_keep_the_rest() -> None:
    loader = HostLoader(split(), RunConfig(batch_size=4), CpuAccelerator())
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    batches = list(loader.batches(order))
    assert [len(targets) for _, targets in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([targets for _, targets in batches]), order)
    assert torch.equal(torch.cat([inputs for inputs, _ in batches])[:, 0], order.float())


def test_a_long_epoch_repeats_the_tensors() -> None:
    inputs, targets = split(4, length=10).take(torch.tensor([0, 5, 9]))
    assert targets.tolist() == [0, 1, 1]
    assert inputs[:, 0].tolist() == [0, 1, 1]


def test_workers_leave_pinning_to_the_data_loader() -> None:
    for pinned in (False, True):
        workers = WorkerPool(split(), RunConfig(num_workers=1, pin_memory=pinned))
        assert workers._loader is not None
        assert workers._loader.pin_memory is pinned


def test_a_worker_that_imports_the_page_does_not_run_it() -> None:
    """multiprocessing imports the server's main script in each worker under this name."""
    imported = runpy.run_path(str(ROOT / "dashboard" / "main.py"), run_name="__mp_main__")
    assert {"st", "pages"}.isdisjoint(imported)


def test_what_each_rank_of_a_machine_keeps_has_to_fit_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank decodes a copy of its own."""
    bytes_of_all = 10 * (4 + 8)  # a float and an int64 a sample
    free = SimpleNamespace(available=4 * bytes_of_all - 1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    three = RunConfig(
        dataset_on_device=True, strategy=Strategy.DDP, devices_per_node=3, num_nodes=2
    )
    make_loader(split(), three, CpuAccelerator())
    four = RunConfig(dataset_on_device=True, strategy=Strategy.DDP, devices_per_node=4)
    said = "takes 120 B in each of 4 processes, but only 479 B of host memory"
    with pytest.raises(RunFailedError, match=said):
        make_loader(split(), four, CpuAccelerator())
