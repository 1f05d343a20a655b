"""How often the lab's verdicts are wrong, and how wide its intervals are: simulated sweeps.

    python -m benchmarks.lab_errors [--sweeps 10000]

The samples are simulated, and judged by `stepscope.lab.statistics` with the looks, the number of
baseline runs and the early stopping of a real sweep. Null sweeps have no effect, no margin, and no
variant leaves as "no difference" (`strict`), so that each has every chance of a false verdict. The
targets: at most 5 % of them have any "faster" or "slower", with an upper 95 % bound of 5.5 %.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks.report import at_most, report, say
from stepscope.lab.plan import LOOKS
from stepscope.lab.statistics import EffectEstimate, Rules, Side, estimate_effects, estimate_loss
from trainer.config import RunConfig
from trainer.lab.plan import WorkloadPlan

RULES = WorkloadPlan(config=RunConfig(), variants=()).rules
STRICT = replace(RULES, margin=0.0, same=0.0)
LEAVING = replace(RULES, margin=0.0)
NOISE, DRIFT = 0.012, 0.06
DIFFERENT = (Side.ABOVE, Side.BELOW)
FAMILY_WISE, UPPER_BOUND = 0.05, 0.055


@dataclass(frozen=True, kw_only=True)
class World:
    """True effects of the variants; standard deviations of their samples and of the baseline's."""

    effects: tuple[float, ...]
    noise: tuple[float, ...]
    baseline: float = NOISE
    runs: int = 0

    @property
    def baselines(self) -> int:
        """Runs of the baseline a round: by the plan's rule where `runs` is 0."""
        return self.runs or max(1, round(math.sqrt(len(self.effects))))

    def log_ratios(self, random: np.random.Generator) -> NDArray[np.float64]:
        """Return the log ratios of a sweep: rounds × variants, with a drift over the sweep."""
        rounds, runs, count = LOOKS[-1], self.baselines, self.baselines + len(self.effects)
        logs = random.standard_normal((rounds, count))
        logs *= np.array([self.baseline] * runs + list(self.noise))
        places = random.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1)
        logs -= DRIFT * (np.arange(rounds)[:, None] + places / count) / rounds
        logs[:, runs:] += np.log1p(self.effects)
        return logs[:, runs:] - logs[:, :runs].mean(axis=1, keepdims=True)


def equal(variants: int, noise: float = NOISE, effect: float = 0.0, **others: Any) -> World:
    """Return a world of variants with one noise and one effect."""
    return World(effects=(effect,) * variants, noise=(noise,) * variants, baseline=noise, **others)


def null_worlds() -> dict[str, tuple[World, Rules]]:
    """Return the worlds without an effect, and the rules for each."""
    worlds = {"1 variant": equal(1)}
    for variants in (5, 15):
        half, name = variants // 2, f"{variants} variants"
        same = equal(variants)
        worlds |= {
            name: same,
            f"{name}, half of them 2 × as noisy": replace(
                same, noise=(2 * NOISE,) * half + (NOISE,) * (variants - half)
            ),
            f"{name}, one 3 × as noisy": replace(
                same, noise=(3 * NOISE,) + (NOISE,) * (variants - 1)
            ),
            f"{name}, the baseline 2 × as noisy": replace(same, baseline=2 * NOISE),
        }
    worlds["15 variants, 1 baseline run"] = equal(15, runs=1)
    found = {name: (world, STRICT) for name, world in worlds.items()}
    return found | {
        f"{name}, leaving early": (worlds[name], LEAVING)
        for name in ("15 variants", "15 variants, one 3 × as noisy")
    }


def sweeps(world: World, rules: Rules, count: int) -> Iterator[dict[int, EffectEstimate]]:
    """Yield the last finding of each variant in simulated sweeps; variants leave once decided."""
    random, variants = np.random.default_rng(len(world.effects)), range(len(world.effects))
    for _ in range(count):
        ratios = world.log_ratios(random)
        last: dict[int, EffectEstimate] = {}
        until = dict.fromkeys(variants, LOOKS[0])
        for look in rules.decision_rounds:
            still = [
                variant
                for variant in variants
                if variant not in last or last[variant].side is Side.OPEN
            ]
            until |= dict.fromkeys(still, look)
            found = estimate_effects(
                {str(variant): ratios[: until[variant], variant] for variant in variants}, rules
            )
            last |= {variant: found[str(variant)] for variant in still}
        yield last


def family_wise_error(world: World, rules: Rules, count: int) -> dict[str, float]:
    """Return the share of sweeps with any false verdict, and its upper 95 % bound."""
    wrong = sum(
        any(one.side in DIFFERENT for one in last.values()) for last in sweeps(world, rules, count)
    )
    bound = binomtest(wrong, count, alternative="less").proportion_ci(0.95).high
    return {"error": wrong / count, "upper_bound": float(bound)}


def power(world: World, count: int) -> dict[str, Any]:
    """Return what the plan's own rules find: verdicts, rounds, coverage and bias of effects."""
    found: dict[str, list[float]] = {
        name: [] for name in ("found", "false", "same", "rounds", "no_op_rounds", "covered", "bias")
    }
    for last in sweeps(world, RULES, count):
        no_ops = [last[variant] for variant, effect in enumerate(world.effects) if not effect]
        found["false"] += [float(any(one.side in DIFFERENT for one in no_ops))] * bool(no_ops)
        found["same"] += [float(one.side is Side.SAME) for one in no_ops]
        found["no_op_rounds"] += [one.rounds for one in no_ops]
        for variant, effect in enumerate(world.effects):
            one = last[variant]
            assert one.effect is not None
            assert one.low is not None
            assert one.high is not None
            found["covered"].append(float(one.low <= effect <= one.high))
            if effect:
                side = Side.ABOVE if effect > 0 else Side.BELOW
                found["found"].append(float(one.side is side))
                found["rounds"].append(one.rounds)
                if one.side is side:
                    found["bias"].append(abs(one.effect) - abs(effect))
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def half_widths(variants: int, count: int) -> dict[str, float]:
    """Return mean half-widths after the first look, by the plan's baseline runs and with one."""
    random = np.random.default_rng(0)
    found = {}
    for name, world in (
        ("planned", equal(variants)),
        ("one baseline run", equal(variants, runs=1)),
    ):
        widths: list[float] = []
        for _ in range(count):
            ratios = world.log_ratios(random)[: LOOKS[0]]
            results = estimate_effects(
                {str(variant): ratios[:, variant] for variant in range(variants)}, RULES
            )
            widths += [np.log1p(one.high) - np.log1p(one.low) for one in results.values()]
        found[name] = float(np.mean(widths)) / 2
    return found


def losses(effect: float, count: int, spread: float = 0.02, rounds: int = 5) -> dict[str, float]:
    """Return how often a loss with this true difference gets which verdict after `rounds`."""
    values = np.random.default_rng(0).normal(math.log1p(effect), spread, (count, rounds))
    sides = [estimate_loss(one, RULES).side for one in values]
    return {side.value: sides.count(side) / count for side in Side}


def measure(count: int) -> dict[str, Any]:
    """Run all simulations; `count` is the number of null sweeps."""
    errors: dict[str, dict[str, float]] = {}
    for name, (world, rules) in null_worlds().items():
        errors[name] = family_wise_error(world, rules, count)
        say(f"{name}: {errors[name]}")
    fewer = max(10, count // 5)
    found: dict[str, dict[str, Any]] = {}
    five = (0.0, 0.0, 0.0, 0.05, -0.05)
    worlds = {f"5 %, noise {noise}": equal(1, noise, 0.05) for noise in (0.006, 0.012, 0.02)}
    worlds |= {f"no-op, noise {noise}": equal(1, noise) for noise in (0.006, 0.012, 0.02)}
    for noise in (0.012, 0.02):
        worlds[f"five, noise {noise}"] = replace(equal(5, noise), effects=five)
    worlds["fifteen, noise 0.012"] = replace(equal(15), effects=3 * five)
    worlds["at the margin"] = equal(1, effect=0.01)
    worlds["3 % among three"] = replace(equal(3), effects=(0.03, 0.0, 0.0))
    worlds["3 %, noise 0.02"] = equal(1, 0.02, 0.03)
    for name, world in worlds.items():
        found[name] = power(world, fewer)
        say(f"{name}: {found[name]}")
    targets = {}
    for name, one in errors.items():
        targets[f"error: {name}"] = at_most(one["error"], FAMILY_WISE)
        targets[f"upper bound: {name}"] = at_most(one["upper_bound"], UPPER_BOUND)
    return {
        "targets": targets,
        "power": found,
        "half_widths": {
            variants: half_widths(variants, max(10, fewer // 4)) for variants in (1, 5, 15, 30)
        },
        "losses": {effect: losses(effect, fewer) for effect in (0.0, 0.01, 0.03, 0.05)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=10_000, help="null sweeps a world")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    report("lab_errors", {"sweeps": options.sweeps}, load, measure(options.sweeps))


if __name__ == "__main__":
    main()
