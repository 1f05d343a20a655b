"""Samples/s of Stepscope's loop against the plain loop of the tutorials, same model and data.

    python -m benchmarks.loop [--device cpu|cuda] [--workload digits_cnn] [--pairs 5] [--epochs 20]

Ours is a whole run: recorder, sampler, a row each step, validation, checkpoints. The plain loop is
what tutorials teach: DataLoader over single items, `.item()` every step, the optimizer as it comes;
it records nothing. Both have the same threads, batch size, learning rate and validation.
Pairs are interleaved and their order alternates; the first pair is thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope.run import RunStatus
from stepscope.session.environment import cpu_name
from trainer.config import RunConfig, Workload, defaults
from trainer.devices import list_devices
from trainer.training.run import run
from trainer.workloads import WORKLOADS

TARGET_ON_CPU = 1.5


def ours(config: RunConfig) -> float:
    """Train with Stepscope; return the seconds of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        status = run(config, Path(folder))
        seconds = time.perf_counter() - began
    if status is not RunStatus.FINISHED:
        raise SystemExit(f"The run {status}; nothing was measured.")
    return seconds


def plain(config: RunConfig) -> float:
    """Train as the tutorials do; return the seconds of the whole run."""
    began = time.perf_counter()
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    task = WORKLOADS[config.workload](config)
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    model, loss_fn = task.model.to(device), nn.CrossEntropyLoss()
    train, validation = (
        TensorDataset(split.inputs, split.targets) for split in (task.train, task.validation)
    )
    train_loader = DataLoader(train, batch_size=config.batch_size, shuffle=True)
    validation_loader = DataLoader(validation, batch_size=config.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    losses = []
    for _ in range(config.epochs):
        model.train()
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, targets in validation_loader:
                inputs, targets = inputs.to(device), targets.to(device)
                correct += (model(inputs).argmax(1) == targets).sum().item()
    return time.perf_counter() - began


def measure(config: RunConfig, pairs: int) -> dict[str, object]:
    """Run the pairs and return the result as JSON values."""
    samples = WORKLOADS[config.workload](config).train.length * config.epochs
    mine: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs + 1):
        sides = [(ours, mine), (plain, theirs)]
        for side, rates in sides if pair % 2 else reversed(sides):
            rates.append(samples / side(config))
        print(f"pair {pair}: ours {mine[-1]:.0f}, plain {theirs[-1]:.0f} samples/s")
    mine, theirs = mine[1:], theirs[1:]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    median = statistics.median(ratios)
    return {
        "benchmark": "loop",
        "ratio": round(median, 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "ours_samples_per_sec": round(statistics.median(mine)),
        "plain_samples_per_sec": round(statistics.median(theirs)),
        "pairs": pairs,
        "target": TARGET_ON_CPU if config.device == "cpu" else None,
        "met": median >= TARGET_ON_CPU if config.device == "cpu" else None,
        "config": config.to_params() | {"batch_size": config.batch_size, "epochs": config.epochs},
        "machine": {
            "device": next(d.name for d in list_devices() if d.id == config.device),
            "cpu": cpu_name(),
            "threads": config.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workload", choices=["digits_cnn", "digits_mlp"], default="digits_cnn")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    gpus = [d.id for d in list_devices() if d.cuda_index is not None and d.reason is None]
    if args.device == "cuda" and not gpus:
        raise SystemExit("--device cuda: torch finds no usable GPU here.")
    device = gpus[0] if args.device == "cuda" else "cpu"
    config = defaults(Workload(args.workload), device)
    threads = max(1, (os.cpu_count() or 1) // 2)
    config = replace(config, epochs=args.epochs, threads=threads)
    print(json.dumps(measure(config, args.pairs)))


if __name__ == "__main__":
    main()
