"""A DDP training whose steps wait as for a device, with a delay in one phase of one rank.

    torchrun --standalone --nproc-per-node 4 straggler_script.py --phase input --rank 2 --delay 0.1

Each phase sleeps, so that four ranks do not fight for two cores: input 6, forward 12, backward 16,
optimizer 6 ms, together BASE_S, each with 3 % of noise. `--delay` is a share of the whole step,
which with it takes that much longer: 0.1 makes 40 ms 44.4, so that the delay is 10 % of the step.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PHASES = {"input": 0.006, "forward": 0.012, "backward": 0.016, "optimizer": 0.006}
"""Seconds that each phase waits."""
BASE_S = sum(PHASES.values())
NOISE = 0.03
BATCH = 8


class Waits:
    """How long each phase of this rank waits."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._rng = random.Random(rank)
        self._seconds = dict(PHASES)
        self._rotates = options.rank == ROTATING
        self._extra = BASE_S * options.delay / (1 - options.delay)
        self._phase, self._rank, self._own = options.phase, options.rank, rank
        self._order = random.Random(0)

    def next_step(self) -> None:
        """Draw the slow rank of the step, the same on all ranks, where it is another each time."""
        if self._rotates:
            self._rank = self._order.randrange(dist.get_world_size())

    def __call__(self, phase: str) -> None:
        """Wait for a phase of a step."""
        seconds = self._seconds[phase] * self._rng.gauss(1, NOISE)
        if phase == self._phase and self._own == self._rank:
            seconds += self._extra
        time.sleep(max(0.0, seconds))


ROTATING = -1
"""In place of a rank: another one each step."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Batches of noise, each of which takes a while to load."""

    def __init__(self, steps: int, width: int, waits: Waits) -> None:
        self._steps, self._width, self._waits = steps, width, waits

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._waits("input")
        return torch.randn(BATCH, self._width), torch.randn(BATCH, 1)


class Wait(torch.autograd.Function):
    """Nothing but a wait, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, waits: Waits) -> Tensor:
        """Wait, and return the values."""
        ctx.waits = waits
        waits("forward")
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Wait, and return the gradients."""
        ctx.waits("backward")
        return gradients[0], None


class Waiting(nn.Module):
    """A small network that waits in the middle."""

    def __init__(self, width: int, waits: Waits) -> None:
        super().__init__()
        self._waits = waits
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number a sample."""
        waited = Wait.apply(self.first(inputs), self._waits)  # type: ignore[no-untyped-call]
        outputs: Tensor = self.last(waited)
        return outputs


class WaitingSgd(torch.optim.SGD):
    """An optimizer whose step waits."""

    waits: Waits

    def step(self, closure: Any = None) -> Any:
        """Wait, then update."""
        self.waits("optimizer")
        return super().step(closure)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phase", choices=[*PHASES, "none"], default="none")
    parser.add_argument("--rank", type=int, default=0, help=f"{ROTATING}: another one each step")
    parser.add_argument("--delay", type=float, default=0.0, help="share of the step, below 1")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=64, help="2048: averaging takes longest")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    waits = Waits(options, dist.get_rank())
    model = DistributedDataParallel(Waiting(options.width, waits))
    optimizer = WaitingSgd(model.parameters(), lr=0.001)
    optimizer.waits = waits
    samples = Samples(options.steps, options.width, waits)
    for inputs, targets in DataLoader(samples, batch_size=None):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        waits.next_step()
    dist.barrier()
    # gloo's thread lets go of the last tensors, for which it needs Python's lock. Asked to end
    # before that, torch 2.13 waits for this thread and keeps the lock: the process hangs.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
