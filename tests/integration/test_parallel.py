"""Several ranks train as one process with their global batch, by torchrun over gloo.

The sums of the gradients are rounded in another order, so that curves of losses agree to some 3e-7
of their values here. RELATIVE allows for a longer run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import RunStatus, read_run
from tests.support.run_values import metric
from tests.support.training_jobs import job, launch, mean_loss
from tests.support.training_runs import save_at_step
from trainer.config import (
    LRSchedule,
    Precision,
    RunConfig,
    Strategy,
    Workload,
    defaults,
)
from trainer.runners.training_run import run
from trainer.training.checkpoint import read_checkpoint

pytestmark = pytest.mark.timeout(400)  # the first test waits for all jobs of so many ranks
RELATIVE = 1e-5
DDP, FSDP = Strategy.DDP, Strategy.FSDP
MLP = replace(defaults(Workload.DIGITS_MLP), batch_size=512, epochs=2, num_threads=1)
MLP = replace(MLP, lr_scheduler=LRSchedule.NONE)  # a cosine would end with each run's max_steps
EPOCH, LEFT = 26, 142  # steps, and samples of the last of them: 12,942 = 25 × 512 + 142
HALF, END = 10, 32  # steps of a run, and of the one that resumes it
GPT = replace(defaults(Workload.GPT), epochs=1, max_steps=6, num_threads=1, learning_rate=0.01)
GPT = replace(GPT, num_layers=2, width=32, context_length=32, max_grad_norm=0.5)
NORMS = replace(defaults(Workload.MEMORY_STRESS), batch_size=64, width=8, image_size=8, max_steps=3)
HALF_PRECISION = replace(MLP, precision=Precision.FP16, max_steps=EPOCH, epochs=1)
OVERFLOWS = 2.0**30
"""A loss scale with which the first steps of fp16 have infinite gradients."""
SPLIT_STEP = replace(MLP, batch_size=128, gradient_accumulation_steps=4)  # 64 of each of two ranks


def alone(root: Path, name: str, config: RunConfig) -> Path:
    """Train in this process."""
    (root / name).mkdir()
    assert run(config, root / name) is RunStatus.FINISHED, read_run(root / name).reason
    return root / name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of this module lie beside each other, so that they can resume each other."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(root: Path) -> Path:
    """What one process has trained, with a checkpoint of the first epoch's last step."""
    with pytest.MonkeyPatch.context() as patch:
        save_at_step(patch, EPOCH)
        return alone(root, "one", replace(MLP, max_steps=END))


@pytest.fixture(scope="module")
def two(root: Path, one: Path) -> Path:
    """What two ranks have trained; in the last of their jobs rank 1 fails."""
    jobs = {
        "ddp": job(MLP, DDP, 2, max_steps=EPOCH + 2),
        "accumulated": job(SPLIT_STEP, DDP, 2, max_steps=8),
        "fsdp": job(MLP, FSDP, 2, max_steps=EPOCH + 2),
        "fsdp-accumulated": job(SPLIT_STEP, FSDP, 2, max_steps=8),
        "gpt-ddp": job(GPT, DDP, 2),
        "gpt-fsdp": job(GPT, FSDP, 2, activation_checkpointing=True, kernel_warmup=True),
        "fp16-fsdp": job(replace(HALF_PRECISION, max_grad_norm=100.0), FSDP, 2),
        "norms": job(NORMS, DDP, 2),
        "norms-saved": job(NORMS, FSDP, 2),
        "half-ddp": job(MLP, DDP, 2, max_steps=HALF),
        "half-fsdp": job(MLP, FSDP, 2, max_steps=HALF),
        "validated-first": job(
            MLP, FSDP, 2, max_steps=EPOCH + 2, resume_from=f"one/step-{EPOCH}.pt"
        ),
        "failed": job(MLP, DDP, 2),
    }
    launch(
        2,
        root,
        jobs,
        fails={"failed": (1, 5)},
        saves={"norms": 2, "norms-saved": 2},
        scale={"fp16-fsdp": OVERFLOWS},
    )
    return root


@pytest.mark.parametrize("name", ["ddp", "accumulated", "fsdp", "fsdp-accumulated"])
def test_two_ranks_give_the_losses_of_one_process(name: str, two: Path, one: Path) -> None:
    losses = mean_loss(two / name)
    assert len(losses) == read_run(two / name).run_json["step"]
    expected = metric(one, "train/loss")[: len(losses)]
    assert losses == pytest.approx(expected, rel=RELATIVE)
    own = metric(two / name, "train/loss", rank=1)
    assert np.abs(own - losses).max() > 1e-3, "each rank records the loss of its own samples"


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_all_ranks_have_the_validation_loss_of_the_whole_split(
    name: str, two: Path, one: Path
) -> None:
    found = [metric(two / name, "val/loss", rank=rank) for rank in (0, 1)]
    assert found[0].tolist() == found[1].tolist()  # equal bit by bit: ranks decide by it
    assert found[0][0] == pytest.approx(metric(one, "val/loss")[0], rel=RELATIVE)
    scored = metric(two / name, "val/accuracy")[0]
    assert scored == pytest.approx(metric(one, "val/accuracy")[0], abs=1e-4)


def test_a_checkpoint_within_an_epoch_has_the_batch_norm_of_rank_0(two: Path) -> None:
    """That of DDP is known to be rank 0's: no other rank writes."""
    expected, found = (
        read_checkpoint(two / name / "step-2.pt")["model"] for name in ("norms", "norms-saved")
    )
    names = [name for name in expected if "running_" in name]
    assert len(names) >= 4
    for name in names:
        assert found[name].numpy() == pytest.approx(expected[name].numpy(), rel=1e-3), name


def test_blocks_of_a_gpt_are_spread_and_clipped_as_one_model(two: Path) -> None:
    expected = alone(two, "gpt", GPT)
    for name in ("gpt-ddp", "gpt-fsdp"):
        losses = mean_loss(two / name)
        assert losses == pytest.approx(metric(expected, "train/loss"), rel=RELATIVE), name
        norms = metric(two / name, "train/grad_norm", rank=1)
        assert norms == pytest.approx(metric(expected, "train/grad_norm"), rel=10 * RELATIVE), name
        counts = [read_run(folder).run_json["parameters"] for folder in (two / name, expected)]
        assert counts[0] == counts[1], "the head stays tied"
    assert norms.max() > GPT.max_grad_norm


@pytest.mark.parametrize("half", ["ddp", "fsdp"])
def test_two_ranks_go_on_as_one(half: str, two: Path, one: Path) -> None:
    config = replace(MLP, max_steps=END, resume_from=f"half-{half}/last.pt")
    last = alone(two, f"{half}-one", config)
    assert read_run(last).run_json["first_step"] == HALF
    assert metric(last, "train/loss") == pytest.approx(
        metric(one, "train/loss")[HALF:], rel=RELATIVE
    )
    assert metric(last, "val/loss") == pytest.approx(metric(one, "val/loss"), rel=RELATIVE)


def test_a_run_resumed_after_an_epochs_last_step_validates_and_trains_on(
    two: Path, one: Path
) -> None:
    """Its validation is the first forward pass of the process."""
    losses = mean_loss(two / "validated-first")
    assert losses == pytest.approx(metric(one, "train/loss")[EPOCH : EPOCH + 2], rel=RELATIVE)
    validated = metric(two / "validated-first", "val/loss")
    assert validated[0] == pytest.approx(metric(one, "val/loss")[0], rel=RELATIVE)


def test_a_rank_that_fails_ends_the_job_with_its_reason(two: Path) -> None:
    found = read_run(two / "failed")
    assert found.status is RunStatus.FAILED
    assert str(found.reason).startswith("Rank 1: ")
    assert "ValueError" in str(found.reason)
    assert found.run_json["step"] <= 6, "rank 0 does not go on alone"


def test_a_loss_that_is_no_number_ends_all_ranks(tmp_path: Path) -> None:
    jobs = {"nan": job(replace(defaults(Workload.LINEAR), learning_rate=100.0), DDP, 2)}
    launch(2, tmp_path, jobs, fails={"nan": (-1, 0)})
    assert read_run(tmp_path / "nan").status is RunStatus.FAILED
    names = ["run.json", "rank1.json"]
    said = [json.loads((tmp_path / "nan" / name).read_text()) for name in names]
    # torchrun ends the others before they have told of the same.
    assert len({one["step"] for one in said if one["status"] == RunStatus.FAILED}) == 1
    assert RunStatus.FINISHED not in {one["status"] for one in said}


def test_all_ranks_skip_the_same_steps_of_fp16(two: Path) -> None:
    scales = [metric(two / "fp16-fsdp", "train/amp_scale", rank=rank)[-1] for rank in (0, 1)]
    assert 1 < scales[0] == scales[1] < OVERFLOWS / 4, "several steps were skipped"
    losses = mean_loss(two / "fp16-fsdp")
    assert np.isfinite(losses).all()
    assert losses[-5:].mean() < 0.98 * losses[:5].mean()
