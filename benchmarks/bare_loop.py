"""The digits CNN trained by a bare loop: `python -m benchmarks.bare_loop THREADS`.

The product's model, data, optimizer and step, without recorder, sampler, commands, checkpoints or
server. For each line `SECONDS` on stdin it trains that long, validation included, and prints one
JSON line; between lines it sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from trainer.config import RunConfig, Workload, defaults
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import Loader
from trainer.training.precision import autocast
from trainer.training.state import TrainState
from trainer.training.step import TrainStep
from trainer.workloads import WORKLOADS

EPOCHS = 100_000


def step_times(config: RunConfig) -> Iterator[float]:
    """Train forever; yield each step's seconds, from one step boundary to the next."""
    torch.manual_seed(config.seed)
    task, compute = WORKLOADS[config.workload](config), CpuAccelerator()
    task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training = TrainState(config, task.model, compute)
    step = TrainStep(
        model=task.model,
        loss=task.loss,
        optimizer=training.optimizer,
        scaler=training.scaler,
        autocast=autocast(config.precision, compute.device),
        max_grad_norm=config.max_grad_norm,
    )
    loader = Loader(task.train, config, compute)
    validation = Loader(task.validation, config, compute)
    while True:
        batches = loader.batches(training.order(task.train.length))
        boundary = time.perf_counter()
        for batch in batches:
            step(*batch)
            now = time.perf_counter()
            yield now - boundary
            boundary = time.perf_counter()
        task.model.eval()
        with torch.inference_mode():
            order = torch.arange(task.validation.length)
            losses = [task.loss(task.model(x), y) for x, y in validation.batches(order)]
            loss = torch.stack(losses).mean().item()
        task.model.train()
        training.next_epoch(loss)


def train(steps: Iterator[float], seconds: float) -> dict[str, float]:
    """Take steps for `seconds`; return their rate inside the steps and by the wall clock."""
    began, times = time.perf_counter(), []
    while time.perf_counter() - began < seconds:
        times.append(next(steps))
    wall = time.perf_counter() - began
    return {"steps_per_s": len(times) / sum(times), "wall_steps_per_s": len(times) / wall}


def main() -> None:
    """Train when asked to."""
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    config = replace(defaults(Workload.DIGITS_CNN), epochs=EPOCHS, num_threads=threads)
    steps = step_times(config)
    for line in sys.stdin:
        print(json.dumps(train(steps, float(line))), flush=True)


if __name__ == "__main__":
    main()
