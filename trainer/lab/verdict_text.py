"""Verdicts and their sentences, the same on the page, in the terminal and in files; pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from trainer.lab.comparison import ComparisonState
from trainer.lab.statistics import DriftTest, EffectEstimate, Rules, Side


class VariantVerdict(StrEnum):
    """What a sweep says of an arm; `measuring` only while it runs."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"
    UNDECIDED = "undecided"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"
    MEASURING = "measuring"


EFFECT = (
    "An effect is the change of samples/s relative to the baseline of the same round, as geometric "
    "mean over the rounds. The column samples/s is the median over all trials of a setting, "
    "unpaired, so both can differ where the machine's speed changes between rounds."
)
_OF_SPEED = {
    Side.ABOVE: VariantVerdict.FASTER,
    Side.BELOW: VariantVerdict.SLOWER,
    Side.SAME: VariantVerdict.NO_DIFFERENCE,
}
_NOTHING = EffectEstimate(Side.OPEN, 0)
_HUGE = 10.0
"""Effects above this have no figure: two rounds alone may give an interval up to a million."""
_OF_LOSS = {
    Side.ABOVE: "worse",
    Side.BELOW: "better",
    Side.SAME: "same",
    Side.OPEN: "not_shown_equal",
}


def verdict_json(
    standing: ComparisonState, name: str, rules: Rules, *, over: bool
) -> dict[str, Any]:
    """Return the verdict on a challenger as sweep.json has it, without its metrics.

    `over` is True once no further sample comes for it, also because the sweep was stopped.
    """
    finding = standing.speed.get(name, _NOTHING)
    reason: str | None = None
    if name in standing.failed:
        verdict, reason = VariantVerdict.FAILED, standing.failed[name]
        text = f"failed: {reason}"
    elif finding.side is not Side.OPEN:
        verdict = _OF_SPEED[finding.side]
        text = _decided(finding)
    else:
        verdict = VariantVerdict.UNDECIDED if over else VariantVerdict.MEASURING
        text = _open(finding, over=over)
        first = min(rules.judged_after, default=None)
        if over and (first is None or finding.rounds < first):
            reason = (
                f"Only {_rounds(finding.rounds)}: results are evaluated from round "
                f"{min(rules.looks)} on."
            )
    if name not in standing.failed:
        stalls = _stalls(finding, standing.mean_effect.get(name))
        reason = " ".join(filter(None, (reason, standing.flaky.get(name), stalls))) or None
    return {
        "verdict": verdict,
        **_figures(finding),
        "resolution": finding.resolution,
        "rounds": finding.rounds,
        "reason": reason,
        "text": text,
        "loss": of_loss(standing, name),
    }


def _stalls(finding: EffectEstimate, mean: float | None) -> str | None:
    """Say that the mean over all steps tells another effect than the median over blocks."""
    effect, resolution = finding.effect, finding.resolution
    if mean is None or effect is None or resolution is None or abs(mean - effect) <= resolution:
        return None
    return (
        f"By the mean over all steps it is {signed(mean)} instead of {signed(effect)}: rare "
        "slow steps count there, not in the verdict."
    )


def impossible(reason: str) -> dict[str, Any]:
    """Return the verdict on an arm that cannot be."""
    nothing = _figures(_NOTHING)
    return {
        "verdict": VariantVerdict.IMPOSSIBLE,
        **nothing,
        "resolution": None,
        "rounds": 0,
        "reason": reason,
        "text": f"unsupported: {reason}",
        "loss": {"verdict": "undecided", **nothing, "text": "no loss"},
    }


def of_loss(standing: ComparisonState, name: str) -> dict[str, Any]:
    """Return what the loss after equal steps says, as sweep.json has it."""
    finding = standing.loss.get(name, _NOTHING)
    broken = standing.broken.get(name, 0)
    verdict = _OF_LOSS[finding.side]
    if broken:
        verdict = "worse"
        of = standing.speed[name].rounds
        text = f"loss is NaN or infinite in {broken} of {_rounds(of)}"
    elif finding.effect is None:
        verdict, text = "undecided", "no loss to compare yet"
    elif finding.side is Side.OPEN:
        text = f"loss not shown equal: {signed(finding.effect)} {_interval(finding)}"
    elif finding.side is Side.SAME:
        text = f"loss equal within ±{percent(finding.resolution)}"
    else:
        size = "higher" if verdict == "worse" else "lower"
        text = f"loss {size} by {percent(abs(finding.effect))} {_interval(finding, absolute=True)}"
    return {"verdict": verdict, **_figures(finding), "text": text}


def _figures(finding: EffectEstimate) -> dict[str, float | None]:
    return {"effect": finding.effect, "low": finding.low, "high": finding.high}


def of_drift(found: DriftTest | None, first_to_last: float | None) -> dict[str, Any] | None:
    """Return what Spearman's test says of the baseline over the rounds; None where untested."""
    if found is None:
        return None
    figures = f"(Spearman's ρ = {found.rho:.2f}, p = {found.p:.2g})"
    text = f"The baseline shows no drift over the rounds {figures}."
    if found.p < 0.05:
        way = "slower" if found.rho < 0 else "faster"
        size = "" if first_to_last is None else f" by {percent(abs(first_to_last))}"
        text = (
            f"The machine got {way}{size} from the first to the last round {figures}. Each "
            "round compares its own trials, so the verdicts hold; intervals may be wider."
        )
    return {"rho": found.rho, "p": found.p, "text": text}


def percent(fraction: float | None) -> str:
    """Return a fraction in percent with one digit.

    >>> percent(0.1205), percent(80_000)
    ('12.0 %', 'above 1000 %')
    """
    if fraction is None:
        return "?"
    return f"{100 * fraction:.1f} %" if fraction <= _HUGE else f"above {100 * _HUGE:.0f} %"


def signed(fraction: float) -> str:
    """Return a fraction in percent with its sign.

    >>> signed(-0.012), signed(0)
    ('−1.2 %', '+0.0 %')
    """
    if fraction > _HUGE:
        return f"above +{100 * _HUGE:.0f} %"
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def of_best(sweep: Mapping[str, Any]) -> str | None:
    """Return what a sweep says of its best combination, a sentence; None before there is one."""
    best = sweep["best"]
    if best is not None:
        why = f" {best['reason']}" if best["reason"] else ""
        labels = {arm["name"]: arm["label"] for arm in sweep["arms"]}
        names = " + ".join(labels.get(name, name) for name in best["arms"])
        return f"{names}: {best['text']}; {best['loss']['text']}.{why}"
    if sweep["combining"] and sweep["status"] == "finished":
        return "none: the loss of each combination that was faster is worse."
    return None


def summary(counts: Mapping[str, int]) -> str:
    """Return how many arms have which verdict, in the order of the verdicts.

    >>> summary({"slower": 1, "faster": 2})
    '2 faster, 1 slower'
    """
    return ", ".join(
        f"{counts[verdict]} {verdict.replace('_', ' ')}"
        for verdict in VariantVerdict
        if counts.get(verdict)
    )


def _decided(finding: EffectEstimate) -> str:
    if finding.side is Side.SAME:
        return f"no difference larger than {percent(finding.resolution)}"
    effect = finding.effect or 0.0
    way = "faster" if effect > 0 else "slower"
    return f"{way} by {percent(abs(effect))} {_interval(finding, absolute=True)}"


def _open(finding: EffectEstimate, *, over: bool) -> str:
    start = f"{'inconclusive' if over else 'measuring,'} after {_rounds(finding.rounds)}"
    if finding.effect is None:
        return start
    return f"{start}: {signed(finding.effect)} {_interval(finding)}"


def _interval(finding: EffectEstimate, *, absolute: bool = False) -> str:
    low, high = finding.low or 0.0, finding.high or 0.0
    if absolute:
        low, high = sorted((abs(low), abs(high)))
        return f"[{100 * low:.1f}, {100 * high:.1f}]"
    return f"[{signed(low)[:-2]}, {signed(high)[:-2]}]"


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"
