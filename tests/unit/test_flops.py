"""Floating-point operations of a model, counted by hand and by torch, and the peaks of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config import Precision, RunConfig, Strategy, Workload, defaults
from trainer.training.config_validation import TrainDevice
from trainer.training.flops import FlopsMeter, count, peak_of
from trainer.workloads.build import WORKLOADS
from trainer.workloads.task import Task, TensorSplit

H100 = "NVIDIA H100 80GB HBM3"
GPU = TrainDevice(id="GPU-1", name=H100, memory_total=2**36, cuda_index=0)
CPU = TrainDevice(id="cpu", name="CPU", memory_total=2**34)


def task(model: nn.Module, *shape: int) -> Task:
    """A task whose loss is the sum of the model's outputs; inputs (8, *shape)."""
    split = TensorSplit.of(torch.ones(8, *shape), torch.ones(8))
    return Task(model=model, train=split, validation=split, loss=lambda out, _: out.sum())


def test_a_linear_layer() -> None:
    # Backward: the gradient of the weights; that of the inputs is not wanted.
    first = 2 * 8 * 64 * 32
    second = 2 * 8 * 32 * 10
    two = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    assert count(task(two, 64), 8) == 2 * first + 3 * second


@pytest.mark.parametrize("workload", [Workload.DIGITS_CNN, Workload.LINEAR])
def test_counting_changes_nothing(workload: Workload) -> None:
    config = replace(defaults(workload), batch_size=8)
    made = WORKLOADS[workload](config)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    drawn = torch.get_rng_state()
    first = count(made, 8)
    assert first == count(made, 8) > 0
    assert count(made, 16) == 2 * first
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(weights.grad is None for weights in made.model.parameters())


def test_a_language_model_needs_six_operations_a_weight_and_token() -> None:
    """6 N T of Kaplan et al. (arXiv:2001.08361), and PaLM's 12 L d T a token for its attention.

    N are the weights of linear layers, the head's too: what is looked up is not multiplied.
    """
    config = replace(
        defaults(Workload.GPT), batch_size=4, width=128, num_layers=3, context_length=64
    )
    made = WORKLOADS[Workload.GPT](config)
    weights = sum(
        part.weight.numel() for part in made.model.modules() if isinstance(part, nn.Linear)
    )
    tokens = 4 * 64
    attention = 12 * config.num_layers * config.width * config.context_length * tokens
    assert count(made, 4) == pytest.approx(6 * weights * tokens + attention, rel=0.001)


class Reads(nn.Linear):
    """Asks for a value of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.mean().item())


def test_a_model_that_cannot_be_counted_trains_without() -> None:
    speed = FlopsMeter.of(task(Reads(64, 10), 64), RunConfig(batch_size=8), GPU)
    assert speed.per_sample is None
    assert "does not run without values" in str(speed.reason)
    assert speed.row(8, 0.1) == {}
    assert speed.facts(8)["flops_per_step"] is None


def test_speed_and_share_of_the_peak() -> None:
    config = RunConfig(batch_size=8, precision=Precision.BF16)
    speed = FlopsMeter.of(task(nn.Linear(64, 10), 64), config, GPU)
    flops = 2 * 2 * 8 * 64 * 10
    row = speed.row(8, 1e-6)
    assert row == {
        "perf/tflops": pytest.approx(flops / 1e-6 / 1e12),
        "perf/mfu": pytest.approx(100 * flops / 1e-6 / 989.5e12),
    }
    four = replace(config, strategy=Strategy.DP, devices_per_node=4)
    speed = FlopsMeter.of(task(nn.Linear(64, 10), 64), four, GPU)
    facts = speed.facts(32)
    assert (facts["flops_per_step"], facts["peak_flops"]) == (4 * flops, 4 * 989.5e12)


DEVICES = [
    (H100, "bf16", 989.5),
    (H100, "fp32", 67),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
]


@pytest.mark.parametrize(("device", "precision", "tflops"), DEVICES)
def test_known_devices(device: str, precision: str, tflops: float) -> None:
    assert peak_of(device, Precision(precision)) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (None, "No MFU: a CPU's peak depends on its cores, clock and vector units."),
        ("NVIDIA A10G", "the peak of NVIDIA A10G"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a part of a GPU"),
        ("Tesla T4", "has no native bf16 arithmetic."),
    ],
)
def test_what_has_no_peak_says_why(device: Any, said: str) -> None:
    reason = peak_of(device, Precision.BF16)
    assert isinstance(reason, str)
    assert said in reason
