"""Samples/s of Stepscope's loop against loops that people write themselves, same model and data.

    python -m benchmarks.loop [--device cpu|cuda] [--workload digits_cnn] [--pairs 5] [--epochs 20]
    python -m benchmarks.loop --workload images

Ours is a whole run: recorder, sampler, a row each step, validation, checkpoints. The plain loop is
what tutorials teach: DataLoader over single items, `.item()` every step, the optimizer as it comes;
it records nothing. Both have the same batch size, learning rate and validation, and on digits the
same threads. Rounds hold each side once, every other one in reverse; the first is thrown away.

`images` trains the tutorials' classifier on PNG files named in a CSV. There ours has the settings
that the lab found best on the CPU (FOUND), the plain loop has torch's own settings, and a third
side is a loop written by hand with the settings of ours.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.plain_loops import by_hand, images_plainly, train_plainly
from benchmarks.report import at_least, report, say
from stepscope.run import RunStatus
from trainer.config import Precision, RunConfig, Workload, defaults
from trainer.runners.training_run import run
from trainer.training.devices import list_devices
from trainer.workloads.build import WORKLOADS
from trainer.workloads.datasets import VARIABLE
from trainer.workloads.digit_images import write
from trainer.workloads.task import TensorSplit

Side = Callable[[RunConfig], float]
"""Trains with a configuration and returns the seconds of the whole run."""

PLAIN, BY_HAND, BEST = "plain", "by_hand", "lab_best"
ON_CPU = {PLAIN: 1.5}
ON_CPU_IMAGES = {PLAIN: 2.0, BY_HAND: 0.99}
"""Least ratios of our samples/s to those of the other sides."""
FOUND: dict[str, Any] = {"dataset_on_device": True, "num_threads": 2, "precision": Precision.BF16}
"""What the lab found faster, one at a time, on two cores of a Xeon (docs/performance.md)."""


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
    """Train on data in memory as the tutorials do; return the seconds of the whole run."""
    began = time.perf_counter()
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    task = WORKLOADS[config.workload](config)
    assert isinstance(task.train, TensorSplit)
    assert isinstance(task.validation, TensorSplit)
    train, validation = (
        TensorDataset(split.inputs, split.targets) for split in (task.train, task.validation)
    )
    train_plainly(config, task.model, train, validation)
    return time.perf_counter() - began


def measure(
    config: RunConfig, others: Mapping[str, Side], targets: Mapping[str, float], rounds: int
) -> dict[str, Any]:
    """Run the rounds and return the result as JSON values."""
    samples = WORKLOADS[config.workload](config).train.length * config.epochs
    sides: dict[str, Side] = {"ours": ours, **others}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            rates[name].append(samples / sides[name](config))
        found = ", ".join(f"{name} {rates[name][-1]:.0f}" for name in sides)
        say(f"round {number}: {found} samples/s")
    ratios = {
        name: [a / b for a, b in zip(rates["ours"][1:], rates[name][1:], strict=True)]
        for name in others
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {
        "ratios": {
            name: {"ratio": medians[name], "spread": [min(values), max(values)]}
            for name, values in ratios.items()
        },
        "samples_per_sec": {name: statistics.median(of[1:]) for name, of in rates.items()},
        "rounds": rounds,
        "config": config.to_params() | {"batch_size": config.batch_size, "epochs": config.epochs},
        "device": next(one.name for one in list_devices() if one.id == config.device),
        "targets": {name: at_least(medians[name], least) for name, least in targets.items()},
    }


def _digits(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure on data that lie in memory; on CUDA also the lab's best, and by hand the same.

    No target is set on CUDA.
    """
    config = defaults(Workload(args.workload), device)
    config = replace(config, epochs=args.epochs, num_threads=_half_of_the_cores())
    if device == "cpu":
        return measure(config, {PLAIN: plain}, ON_CPU, args.pairs)
    best = replace(config, **{**FOUND, "num_threads": config.num_threads})

    def with_best(side: Side) -> Side:
        return lambda _: side(best)

    others = {PLAIN: plain, BY_HAND: with_best(by_hand), BEST: with_best(ours)}
    return measure(config, others, {}, args.pairs)


def _images(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measure on image files, made under `root`, with the lab's best settings."""
    os.environ[VARIABLE] = str(root)
    write(root / "digits")
    config = replace(defaults(Workload.IMAGES), **FOUND)
    config = replace(config, epochs=args.epochs)
    others = {PLAIN: images_plainly, BY_HAND: by_hand}
    return measure(config, others, ON_CPU_IMAGES, args.pairs)


def _half_of_the_cores() -> int:
    """Return what a run takes by default."""
    return max(1, (os.cpu_count() or 1) // 2)


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--workload", choices=["digits_cnn", "digits_mlp", "images"], default="digits_cnn"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    gc.freeze()  # as the server does, and a run's own process
    load = os.getloadavg()[0]
    if args.workload == "images":
        if args.device == "cuda":
            raise SystemExit("--workload images: its settings were found on a CPU.")
        with tempfile.TemporaryDirectory() as folder:
            found = _images(args, Path(folder))
    else:
        device = "cpu"
        if args.device == "cuda":
            devices = [one for one in list_devices() if one.cuda_index is not None]
            gpus = [one.id for one in devices if one.reason is None]
            if not gpus:
                raise SystemExit("--device cuda: torch finds no usable GPU here.")
            device = gpus[0]
        found = _digits(args, device)
    report("loop", vars(args), load, found)


if __name__ == "__main__":
    main()
