"""Each rank's share of the samples is what torch's DistributedSampler gives, also in mid-epoch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from trainer.config import RunConfig, Runner, Strategy
from trainer.training.rank_info import ALONE, TrainerRank

DDP = replace(RunConfig(), strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=2)


def world(size: int) -> list[TrainerRank]:
    return [TrainerRank(rank, rank, size, size) for rank in range(size)]


def test_a_share_is_that_of_the_distributed_sampler(subtests: pytest.Subtests) -> None:
    for samples, size in itertools.product([1, 7, 8, 12, 13], [2, 3]):
        with subtests.test(f"{samples} of {size}"):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(1))
            for ranks in world(size):
                sampler = DistributedSampler(
                    TensorDataset(order), num_replicas=size, rank=ranks.rank, shuffle=False
                )
                assert ranks.share(order).tolist() == order[list(sampler)].tolist()
            counted = [ranks.share(order)[: ranks.own(samples)].tolist() for ranks in world(size)]
            assert sorted(sum(counted, [])) == sorted(order.tolist()), "each sample once"


def test_shares_of_what_is_left_go_on_from_the_beginning_of_the_order() -> None:
    order = torch.arange(10)
    assert [ranks.share(order, 7).tolist() for ranks in world(2)] == [[7, 9], [8, 0]]
    assert [ranks.share(order, 10).tolist() for ranks in world(2)] == [[], []]


def test_a_run_of_one_process_does_not_look_into_the_environment() -> None:
    environ = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert TrainerRank.of(RunConfig(), environ) == ALONE
    assert TrainerRank.of(DDP, environ) == TrainerRank(3, 1, 4, 2)


def test_ranks_draw_different_numbers_and_rank_0_of_a_resumed_run_goes_on_with_its_own() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ALONE.begin_random(0, 0)
    TrainerRank(0, 0, 2, 2).begin_random(0, 7)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = set()
    for ranks in world(3):
        for step in (0, 7):
            ranks.begin_random(0, step)
            drawn.add(torch.rand(()).item())
    assert len(drawn) == 6
    config = replace(DDP, seed=2**31 - 1)
    assert [ranks.seeded(config).seed for ranks in world(2)] == [2**31 - 1, 0]
