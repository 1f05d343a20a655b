"""GPT and ResNet: shapes, splits, 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pydoc_data import topics
from typing import Any

import pytest
import torch

from tests.support.training_runs import SMALL, losses_on_one_batch
from trainer.config import Workload, defaults
from trainer.workloads import gpt, residual_cnn
from trainer.workloads.build import build_task
from trainer.workloads.task import Task, TensorSplit


def make(workload: Workload, **changes: Any) -> Task:
    torch.manual_seed(0)
    return build_task(replace(defaults(workload), **changes))


def first_batch(task: Task, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return task.train.take(torch.arange(size))


def test_gpt_scores_every_character_of_the_text() -> None:
    task = make(Workload.GPT, num_layers=1, width=32, context_length=48)
    inputs, targets = first_batch(task, 3)
    scores = task.model(inputs)
    characters = len(set("".join(topics.topics.values())) | {"\n"})
    assert scores.shape == (3, 48, characters)
    # Before it has learned anything it is about as good as guessing.
    assert task.loss(scores, targets).item() == pytest.approx(
        torch.tensor(characters).log().item(), rel=0.05
    )


@pytest.mark.parametrize("context", [8, 4096])
def test_the_held_out_text_is_in_no_training_sample(context: int) -> None:
    task = make(Workload.GPT, context_length=context, width=8, num_layers=1)
    assert isinstance(task.train, TensorSplit)
    assert task.train.length > 5000
    assert task.validation.length > 300
    train, held_out = gpt._texts()
    assert len(held_out) == pytest.approx(len(train) / 9, rel=0.01)
    assert sum(held_out[at : at + 200] in train for at in range(0, len(held_out) - 200, 200)) <= 1


def test_no_score_depends_on_a_later_character() -> None:
    task = make(Workload.GPT, num_layers=2, width=32, context_length=16)
    inputs, _ = first_batch(task, 1)
    changed = inputs.clone()
    changed[0, 10:] = 0
    before, after = task.model.eval()(inputs), task.model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_resnet_has_the_shape_of_resnet_18() -> None:
    classes = residual_cnn.CLASSES
    task = make(Workload.RESNET, batch_size=2)
    # torchvision's ResNet-18 has 11.7 million with 1,000 classes: 11.18 without its last layer.
    weights = sum(p.numel() for p in task.model.parameters()) - 513 * classes
    assert weights == pytest.approx(11.18e6, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workload", [Workload.GPT, Workload.RESNET])
def test_a_model_computes_in_the_type_of_its_weights(workload: Any, dtype: torch.dtype) -> None:
    task = make(workload, **SMALL[workload])
    inputs, targets = first_batch(task, 2)
    loss = task.loss(task.model.to(dtype)(inputs), targets)
    loss.backward()
    assert loss.isfinite()
    for weights in task.model.parameters():
        assert weights.grad is not None
        assert weights.grad.isfinite().all()
        assert (weights.grad != 0).any()


@pytest.mark.parametrize("batch_size", [1, 11, 100])
def test_all_batches_of_synthetic_images_have_the_whole_size(batch_size: int) -> None:
    """A last batch of one image of 32 pixels would have one value a channel in a ResNet."""
    task = make(Workload.RESNET, width=8, image_size=32, batch_size=batch_size)
    assert task.train.length % batch_size == 0
    assert task.train.length > 1024 - batch_size


@pytest.mark.parametrize("workload", list(SMALL))
def test_a_few_steps_on_one_batch_lower_the_loss(workload: Workload) -> None:
    config = replace(defaults(workload), learning_rate=0.01)
    losses = losses_on_one_batch(make(workload, **SMALL[workload]), config, 32)
    assert losses[-1] < 0.8 * losses[0]


def test_validation_digits_are_unseen() -> None:
    task = make(Workload.DIGITS_CNN)
    unshifted = task.train.inputs[4 * 1438 : 5 * 1438]
    seen = {image.numpy().tobytes() for image in unshifted}
    # The data set itself holds a few identical images.
    twins = sum(image.numpy().tobytes() in seen for image in task.validation.inputs)
    assert twins <= 3
