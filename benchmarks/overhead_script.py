"""A training script whose step takes a given time, 0.8 ms at first, for `overhead.py`.

    python benchmarks/overhead_script.py RECORDER FOLDER WIDTH RESULTS [DEVICE]

RECORDER is `bare`, or the recorder that each step is logged to. For each line `STEPS` on stdin it
trains that many steps and writes to the named pipe RESULTS the seconds and the CPU seconds of the
whole process; the first line there is its process number. `calibrate` as RECORDER writes the width
that fits instead, where WIDTH is the time of a step in µs. The script knows nothing of
`stepscope watch`, which runs it as it would any other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.pairs import BARE
from benchmarks.peers.adapters import OURS, START, Log

BATCH = {"cpu": 32, "cuda": 1024}
INPUTS, CLASSES = 64, 10
WARM_STEPS = 100
NARROWEST, WIDEST, WIDTH_STEP = 32, 16384, 16

Step = Callable[[], torch.Tensor]


def training_step(width: int, device: str = "cpu") -> tuple[Step, torch.optim.Optimizer]:
    """Return one step of a three-layer network on a fixed batch: forward, backward, Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    ).to(device)
    inputs = torch.randn(BATCH[device], INPUTS, device=device)
    targets = torch.randint(CLASSES, (BATCH[device],), device=device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step, optimizer


def train(steps: int, step: Step) -> tuple[float, float]:
    """Take steps; return their seconds, and the CPU seconds of all threads meanwhile."""
    cpu_before, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - cpu_before


def logged(step: Step, optimizer: torch.optim.Optimizer, log: Log, tensors: bool) -> Step:
    """Return the step with its four metrics logged, the loss as a tensor or as a number."""
    taken = 0

    def logged_step() -> torch.Tensor:
        nonlocal taken
        loss = step()
        value = loss if tensors else loss.item()
        log(taken, value, optimizer.param_groups[0]["lr"], 0.5, 1.0)
        taken += 1
        return loss

    return logged_step


def fitting_width(step_s: float, device: str) -> int:
    """Return the least width whose step takes `step_s`: doubled until it does, then halved."""

    def is_long(width: int) -> bool:
        step, _ = training_step(width, device)
        train(5, step)
        count = max(2, min(20, round(0.02 / step_s)))
        # The fastest of many: another process on the core makes none of them faster.
        return min(train(count, step)[0] / count for _ in range(20)) >= step_s

    train(WARM_STEPS, training_step(NARROWEST, device)[0])
    high = NARROWEST
    while high < WIDEST and not is_long(high):
        high *= 2
    low = high // 2 if high > NARROWEST else high
    while high - low > WIDTH_STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if is_long(middle) else (middle, high)
    return high


def main() -> None:
    """Train when asked to, until stdin ends."""
    recorder, folder, width, results, device = [*sys.argv[1:], "cpu"][:5]
    torch.set_num_threads(1)
    answers = os.open(results, os.O_WRONLY)

    def answer(*values: float) -> None:
        os.write(answers, (" ".join(map(repr, values)) + "\n").encode())

    if recorder == "calibrate":
        answer(fitting_width(float(width) * 1e-6, device))
        return
    step, optimizer = training_step(int(width), device)
    finish = None
    if recorder != BARE:
        log, finish = START[recorder](Path(folder))
        step = logged(step, optimizer, log, tensors=recorder == OURS)
    train(WARM_STEPS, step)
    answer(os.getpid())
    for line in sys.stdin:
        answer(*train(int(line), step))
    if finish is not None:
        finish()


if __name__ == "__main__":
    main()
