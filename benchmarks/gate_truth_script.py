"""A training with a planted slowdown for `gate_truth.py`: its own, or a script that is not changed.

    python benchmarks/gate_truth_script.py --slow 0.05 [folder script.py arguments]

Without a script a step lasts `DEVICE_S`, in which the host computes and then sleeps, as if it
waited for a device; each step and each process differs by a random factor. After each optimizer
step it waits until the step has taken 1 + `--slow` times its time, times the drift of the machine.
The next step begins at that deadline, so lateness of a wait adds nothing to the planted effect.
"""

from __future__ import annotations

import os
import random
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SLOW = 0.0
"""The default slowdown, as a fraction: `gate_truth.py` commits other values as revisions."""
DEVICE_S = 0.040
STEP_SPREAD, PROCESS_SPREAD = 0.01, 0.005
"""Standard deviations of the random factors."""
FOLDER = "GATE_TRUTH_FOLDER"
"""Names the folder of a sweep: each trial that it has makes the next one slower."""
DRIFT = "GATE_TRUTH_DRIFT"
"""The drift per trial, as a fraction."""
EXACT_S = 0.001


class Slowdown:
    """Waits at each optimizer step, and appends its seconds to a file as a float64.

    A step takes at least `device_s`.
    """

    def __init__(self, slow: float, device_s: float) -> None:
        folder = Path(os.environ[FOLDER])
        samples = folder / "trials.jsonl"
        trial = samples.read_text().count("\n") if samples.exists() else 0
        self._random = random.Random(f"{folder.name} {trial}")
        self._factor = (1 + slow) * (1 + float(os.environ[DRIFT]) * trial)
        if device_s:
            self._factor *= 1 + self._random.gauss(0, PROCESS_SPREAD)
        self._device_s = device_s
        self._file = (folder / f"steps-{trial}").open("wb", buffering=0)
        self._last: float | None = None

    def __call__(self, *_: Any) -> None:
        """Wait; the first step has no known beginning."""
        now = time.perf_counter()
        if self._last is None:
            self._last = now
            return
        seconds = self._device_s * (1 + self._random.gauss(0, STEP_SPREAD))
        until = self._last + max(now - self._last, seconds) * self._factor
        if (left := until - now - EXACT_S) > 0:
            time.sleep(left)
        while time.perf_counter() < until:
            pass
        self._file.write(struct.pack("d", until - self._last))
        self._last = until


def train() -> None:
    """Train a small network until the trial ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(32, 16), torch.randint(10, (32,))
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def main() -> None:
    """Plant the slowdown, then train or run the script."""
    words, slow = sys.argv[1:], SLOW
    if words[:1] == ["--slow"]:
        slow, words = float(words[1]), words[2:]
    register_optimizer_step_post_hook(Slowdown(slow, 0.0 if words else DEVICE_S))
    if not words:
        train()
    folder, file, *arguments = words
    os.chdir(folder)
    sys.argv = [file, *arguments]
    sys.path[:0] = [str(Path(file).resolve().parent), folder]
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
