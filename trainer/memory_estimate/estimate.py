"""One whole answer: the prediction, its margin and verdict, and the curve by batch size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config_validation import TrainDevice
from trainer.lab.trial_process import SampleProcess
from trainer.memory_estimate.batch_size_finder import Point, curve, explore, with_rates
from trainer.memory_estimate.distributed_memory import NOT_MEASURED
from trainer.memory_estimate.free import Free, free_memory
from trainer.memory_estimate.options import ABSENT
from trainer.memory_estimate.past_runs import margin_for, throughputs
from trainer.memory_estimate.predict import capability_of, judge, predict, to_json
from trainer.memory_estimate.probe import measure, sizes_to_measure
from trainer.memory_estimate.safety_margin import Margin

Say = Callable[[str, float], None]
"""Takes what is done now, and the share of it that is done."""


def answer(
    config: RunConfig,
    device: TrainDevice,
    root: Path,
    *,
    largest: bool = False,
    probe: bool = False,
    say: Say = lambda text, share: None,
    started: Callable[[SampleProcess], None] = lambda taker: None,
) -> dict[str, Any]:
    """Return the answer as JSON values.

    Raises RunFailed for data that cannot be used, OSError where a probe has no folder.
    """
    began = time.perf_counter()
    say("Simulating a step on fake tensors", 0.1)
    prediction = predict(config, device)
    free = _free(device)
    say("Looking at earlier runs", 0.3)
    margin = margin_for(
        config,
        root,
        lambda other: predict(other, device).peak.allocated,
        capability_of(device),
    )
    found = to_json(prediction, judge(prediction, free, margin), free, margin)
    if largest:
        found["largest"] = _largest(config, device, root, free, margin, probe, say, started)
    found["seconds"] = round(time.perf_counter() - began, 3)
    return found


def _free(device: TrainDevice) -> Free:
    if device.id == ABSENT:
        return Free(None, None, "This GPU is not installed here, so its memory is unknown.")
    return free_memory(device)


def _largest(
    config: RunConfig,
    device: TrainDevice,
    root: Path,
    free: Free,
    margin: Margin,
    probe: bool,
    say: Say,
    started: Callable[[SampleProcess], None],
) -> dict[str, Any]:
    count = 0

    def needs(size: int) -> tuple[int, int, int]:
        nonlocal count
        count += 1
        say(f"Predicting batch size {size:,}", min(0.9, 0.3 + 0.04 * count))
        other = predict(replace(config, batch_size=size), device)
        return other.peak.allocated, judge(other, free, margin).needed, other.samples

    points = explore(needs, config.batch_size, free.bytes)
    rates = throughputs(root, config)
    missed = [NOT_MEASURED] if probe and config.distributed else []
    if probe and free.bytes is not None and not config.distributed:
        wanted = sizes_to_measure(points, free.bytes, tuple(rates))
        measured, missed = measure(
            config, wanted, root, lambda text, share: say(text, 0.9 + 0.1 * share), started
        )
        rates |= measured
    extra = [Point(size, *needs(size)[:2]) for size in rates if size not in _sizes(points)]
    every = sorted((*points, *extra), key=lambda point: point.batch_size)
    found = curve(with_rates(every, rates), free.bytes)
    return {**found.to_json(), "not_measured": missed}


def _sizes(points: tuple[Point, ...]) -> set[int]:
    return {point.batch_size for point in points}
