"""Several GPUs train as one: DataParallel, and DDP and FSDP2 over NCCL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.run import read_run
from stepscope.store.reader import StoreReader
from tests.conftest import Need
from tests.gpu.conftest import SIMULATED
from tests.support.run_values import metric
from tests.support.training_jobs import job, launch, mean_loss
from trainer.config import Precision, RunConfig, Strategy, Workload, defaults
from trainer.training.devices import gpu_uuid

pytestmark = pytest.mark.timeout(400)  # the first test waits for all jobs of so many ranks
RELATIVE = 1e-5 if SIMULATED else 1e-3
HALF_RELATIVE = 2e-2
OVERFLOWS = 2.0**30
"""A loss scale with which the first steps of fp16 have infinite gradients."""
DDP, FSDP = Strategy.DDP, Strategy.FSDP


def mlp(**changes: Any) -> RunConfig:
    base = defaults(Workload.DIGITS_MLP, gpu_uuid(0))
    return replace(base, batch_size=512, max_steps=8, epochs=1, **changes)


def gpt(**changes: Any) -> RunConfig:
    base = defaults(Workload.GPT, gpu_uuid(0))
    base = replace(
        base, batch_size=16, max_steps=20, epochs=1, num_layers=2, width=32, context_length=32
    )
    return replace(base, max_grad_norm=0.5, learning_rate=0.01, **changes)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(root: Path) -> Path:
    """What one process has trained, on one GPU and on two of them with DataParallel."""
    if not SIMULATED and torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs here")
    half = mlp(precision=Precision.FP16)
    jobs = {
        "one": mlp(),
        "gpt": gpt(),
        "half": half,
        "dp": mlp(strategy=Strategy.DP, devices_per_node=2),
    }
    launch(0, root, jobs, scale={"half": OVERFLOWS}, CUDASIM_DEVICES="2")
    return root


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    jobs = {
        "ddp": job(mlp(), DDP, 2),
        "fsdp": job(mlp(), FSDP, 2),
        "gpt-ddp": job(gpt(), DDP, 2),
        "gpt-fsdp": job(gpt(), FSDP, 2, activation_checkpointing=True, kernel_warmup=True),
        "ddp-half": job(mlp(precision=Precision.FP16), DDP, 2),
        "fsdp-half": job(mlp(precision=Precision.FP16, max_grad_norm=100.0), FSDP, 2),
    }
    scale = {"ddp-half": OVERFLOWS, "fsdp-half": OVERFLOWS}
    launch(2, one, jobs, scale=scale, CUDASIM_DEVICES="2")
    return one


def peaks(folder: Path, rank: int) -> list[int]:
    """Return the most bytes that a rank had allocated, by device."""
    found: list[int] = json.loads((folder / f"peaks{rank}.txt").read_text())
    return found


def test_data_parallel_gives_the_losses_of_one_device(one: Path) -> None:
    expected = metric(one / "one", "train/loss")
    assert metric(one / "dp", "train/loss") == pytest.approx(expected, rel=RELATIVE)
    assert min(peaks(one / "dp", 0)) > 0, "both devices compute"
    assert peaks(one / "one", 0)[1] == 0
    assert len(read_run(one / "dp").run_json["devices"]) == 2


@pytest.mark.parametrize(
    ("name", "like"),
    [
        *(("ddp", "one"), ("fsdp", "one")),
        *(("gpt-ddp", "gpt"), ("gpt-fsdp", "gpt")),
    ],
)
def test_ranks_over_nccl_give_the_losses_of_one_device(name: str, like: str, two: Path) -> None:
    expected = metric(two / like, "train/loss")
    assert mean_loss(two / name) == pytest.approx(expected, rel=RELATIVE)
    values = [metric(two / name, "val/loss", rank=rank).tolist() for rank in (0, 1)]
    assert values[0] == values[1]
    assert values[0] == pytest.approx(metric(two / like, "val/loss").tolist(), rel=RELATIVE)


@pytest.mark.parametrize("name", ["ddp-half", "fsdp-half"])
def test_all_ranks_skip_the_same_steps_of_fp16(name: str, two: Path) -> None:
    scales = [metric(two / name, "train/amp_scale", rank=rank)[-1] for rank in (0, 1)]
    assert scales[0] == scales[1] < OVERFLOWS / 4, "several steps were skipped"
    losses = mean_loss(two / name)
    assert np.isfinite(losses).all()
    alone = metric(two / "half", "train/amp_scale")[-1]
    if scales[0] == alone:  # the weights of FSDP are 16 bits, which may overflow once more or less
        expected = metric(two / "half", "train/loss")
        assert losses == pytest.approx(expected, rel=HALF_RELATIVE)
    assert name != "ddp-half" or scales[0] == alone


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_each_rank_has_its_own_device_and_the_first_samples_all(name: str, two: Path) -> None:
    for rank in (0, 1):
        used = peaks(two / name, rank)
        assert [bytes_ > 0 for bytes_ in used] == [rank == 0, rank == 1]
        file = "run.json" if rank == 0 else "rank1.json"
        said = json.loads((two / name / file).read_text())
        assert said["local_rank"] == rank
        assert len(said["devices"]) == (2 if rank == 0 else 0)
        assert said["device_memory"] > 0
    run_json = read_run(two / name).run_json
    devices = [gpu["uuid"] for gpu in run_json["devices"]]
    assert run_json["device"] == devices[0]
    assert json.loads((two / name / "rank1.json").read_text())["device"] == devices[1]
    assert metric(two / name, "memory/allocated", "samples").max() > 0


def test_fsdp_halves_the_memory_of_the_weights(two: Path) -> None:
    whole, spread = (
        recorded_sample(two / name, "memory/parameters", 1) for name in ("gpt-ddp", "gpt-fsdp")
    )
    assert 0.45 * whole < spread < 0.6 * whole


def recorded_sample(folder: Path, key: str, rank: int) -> float:
    with StoreReader(folder, rank) as reader:
        info = next(series for series in reader.series() if series.stream == "samples")
        block = reader.read(info.id, 0, info.rows, 1)
    return float(np.nanmax(block.mean[block.keys.index(key)]))


def test_more_ranks_than_gpus_are_refused_in_a_sentence(root: Path, need: Need) -> None:
    need(None if SIMULATED else "the number of GPUs is chosen on the simulator")
    jobs = {"too-many": job(mlp(), DDP, 2)}
    launch(2, root, jobs, fails={"too-many": (-1, 0)}, CUDASIM_DEVICES="1")
    # The first rank that fails ends the other, which may not have begun.
    told = [json.loads(file.read_text()) for file in (root / "too-many").glob("r*.json")]
    assert any("can use 1 of this machine" in str(one["reason"]) for one in told)
