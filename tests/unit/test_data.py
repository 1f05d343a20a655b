"""Data: batches whole, in the order asked, repeated where an epoch is longer than the tensors."""

from __future__ import annotations

import runpy
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import Loader, make_loader
from trainer.workloads.task import Batch, TensorSplit

ROOT = Path(__file__).resolve().parents[2]


def split(samples: int = 10, length: int | None = None) -> TensorSplit:
    values = torch.arange(samples)
    return TensorSplit(values.float().unsqueeze(1), values, length or samples)


def test_memory_batches_follow_the_order_and_keep_the_rest() -> None:
    loader = Loader(split(), RunConfig(batch_size=4), CpuAccelerator())
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    batches = list(loader.batches(order))
    assert [len(targets) for _, targets in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([targets for _, targets in batches]), order)


@dataclass(frozen=True)
class Skips:
    """Returns no sample with an odd number."""

    length: int = 6

    def take(self, indices: torch.Tensor) -> Batch:
        return split().take(indices[indices % 2 == 0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_with_fewer_samples_than_indices_is_refused(workers: int) -> None:
    loader = Loader(Skips(), RunConfig(batch_size=4, num_workers=workers), CpuAccelerator())
    with closing(loader), pytest.raises(RunFailedError, match="A batch has 2 of 4 samples"):
        next(loader.batches(torch.arange(6)))


def test_a_long_epoch_repeats_the_tensors() -> None:
    inputs, targets = split(4, length=10).take(torch.tensor([0, 5, 9]))
    assert targets.tolist() == [0, 1, 1]
    assert inputs[:, 0].tolist() == [0, 1, 1]


def test_a_worker_that_imports_the_page_does_not_run_it() -> None:
    """multiprocessing imports the server's main script in each worker under this name."""
    imported = runpy.run_path(str(ROOT / "dashboard" / "main.py"), run_name="__mp_main__")
    assert {"st", "pages"}.isdisjoint(imported)


def test_decoded_data_that_stay_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of_all = 10 * (4 + 8)  # a float and an int64 a sample
    config = RunConfig(dataset_on_device=True)
    for free in (bytes_of_all, bytes_of_all - 1):
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        if free == bytes_of_all:
            make_loader(split(), config, CpuAccelerator())
            continue
        with pytest.raises(RunFailedError, match="takes 120 B, but the host has 119 B free"):
            make_loader(split(), config, CpuAccelerator())
