"""Times of ranks: recorded ones, and made-up ones without a straggler."""

from __future__ import annotations

import json

import numpy as np

from stepscope.distributed.stragglers.step_phases import OWN
from stepscope.store.blocks import Floats
from tests.support.recorded_runs import RECORDED

CASES = json.loads((RECORDED / "stragglers.json").read_text())


def noise(ranks: int, steps: int, seed: int, size: float = 0.1) -> Floats:
    """Phases that differ by chance alone, and now and then by much, as on a busy machine."""
    rng = np.random.default_rng(seed)
    usual = np.array([0.002, 0.006, 0.008, 0.003, 0.001])[None, :, None]
    own = usual * rng.lognormal(0, size, (ranks, len(OWN), steps))
    spikes = rng.random(own.shape) < 0.02
    return np.asarray(np.where(spikes, own + rng.exponential(0.01, own.shape), own))
