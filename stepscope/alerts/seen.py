"""What was recorded since the last look: rows as they are stored become a span for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stepscope.alerts.evaluator import LOSSES, is_of_devices
from stepscope.alerts.rules import Rule, Span
from stepscope.store import Block
from stepscope.store.items import Event, Sample

STALE_S = 30.0
"""Age from which a sampled value no longer says anything; the slowest tier is read every 10 s."""
OF_DEVICES = frozenset({"gpu/mem_used", "gpu/mem_total", "gpu/throttle_reasons", "gpu/util"})
OF_PROCESS = frozenset({"memory/alloc_retries", "memory/reserved"})

Place = tuple[str, str]
"""Source ("" for the process, a UUID for a GPU) and metric."""


class Seen:
    """Keeps what the rules ask for, and no other metric; used by one thread."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        metrics = {rule.metric for rule in rules if rule.enabled and rule.metric}
        of_devices = frozenset(filter(is_of_devices, metrics))
        self._device_keys = OF_DEVICES | of_devices
        self._other_keys = OF_PROCESS | frozenset(LOSSES) | (metrics - of_devices)
        self._fresh: dict[Place, Span] = {}
        self._sampled: dict[Place, list[float]] = {}
        self._held: dict[Place, tuple[Span, float]] = {}
        self._of_steps: set[Place] = set()
        self.samples_gpus = False
        """Says whether this process samples any GPU."""
        self.lost: dict[str, str] = {}
        """Why GPUs cannot be reached, by UUID."""

    def take_steps(self, block: Block) -> None:
        """Take in rows of steps."""
        for row, key in enumerate(block.keys):
            if key not in self._other_keys and not key.startswith("train/loss."):
                continue
            values = block.mean[row]
            have = np.flatnonzero(block.count[row] + block.odd[row])
            if not len(have):
                continue
            given, odd = values[have], have[block.odd[row][have] > 0]
            known = given[~np.isnan(given)]
            span = Span(
                float(known.min()) if len(known) else None,
                float(known.max()) if len(known) else None,
                float(given[-1]),
                float(values[odd[0]]) if len(odd) else None,
                int(block.step[odd[0]]) if len(odd) else None,
            )
            former = self._fresh.get(("", key))
            self._fresh["", key] = span if former is None else former.then(span)
            self._of_steps.add(("", key))

    def take_sample(self, sample: Sample) -> None:
        """Take in one tick of the sampler."""
        keys = self._device_keys if sample.source else self._other_keys
        self.samples_gpus = self.samples_gpus or bool(sample.source)
        for key in keys & sample.values.keys():
            value = sample.values[key]
            if value is not None:
                self._sampled.setdefault((sample.source, key), []).append(value)

    def take_event(self, event: Event) -> None:
        """Take in what the sampler says of GPUs that are lost or back."""
        uuid = str(event.data.get("uuid"))
        if event.kind == "gpu_lost":
            self.lost[uuid] = event.text.partition(": ")[2] or event.text
        elif event.kind == "gpu_recovered":
            self.lost.pop(uuid, None)

    def since_last(self, now: float) -> dict[Place, Span]:
        """Return what came since the last call; where nothing came, the newest value before."""
        fresh, self._fresh = self._fresh, {}
        sampled, self._sampled = self._sampled, {}
        for place, values in sampled.items():
            span = Span.of_all(values)
            fresh[place] = fresh[place].then(span) if place in fresh else span
        for place, span in fresh.items():
            # A value of a step stays true until the next step; a sampled one grows old.
            until = math.inf if place in self._of_steps else now + STALE_S
            self._held[place] = span.held(), until
        held = {place: span for place, (span, until) in self._held.items() if now < until}
        return held | fresh
