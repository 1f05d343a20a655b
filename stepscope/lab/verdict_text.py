"""Verdicts and their sentences, for the page and files, and a sweep as a table in a terminal. Pure.

Texts of a foreign folder are escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from stepscope.common.formatting import (
    format_bytes,
    format_duration,
    format_short_time,
    printable,
    three_digits,
)
from stepscope.lab.comparison import ComparisonState
from stepscope.lab.statistics import EffectEstimate, Rules, Side


class VariantVerdict(StrEnum):
    """The verdict on a variant; `measuring` only while the sweep is running."""

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
_OF_LOSS = {
    Side.ABOVE: "worse",
    Side.BELOW: "better",
    Side.SAME: "same",
    Side.OPEN: "not_shown_equal",
}
_NOTHING = EffectEstimate(Side.OPEN, 0)
MAX_EFFECT = 10.0
"""Larger effects have no figure: an interval of two rounds can reach a million."""


def verdict_json(state: ComparisonState, name: str, rules: Rules, *, over: bool) -> dict[str, Any]:
    """Return the verdict on a variant for sweep.json; `over`: no further trial follows."""
    estimate = state.speed.get(name, _NOTHING)
    reason = state.failed.get(name)
    if reason is not None:
        verdict, text = VariantVerdict.FAILED, f"failed: {reason}"
    elif estimate.side is not Side.OPEN:
        verdict, text = _OF_SPEED[estimate.side], _decided(estimate)
    else:
        verdict = VariantVerdict.UNDECIDED if over else VariantVerdict.MEASURING
        text = f"{'inconclusive' if over else 'measuring,'} after {_rounds(estimate.rounds)}"
        if estimate.effect is not None:
            text += f": {signed(estimate.effect)} {_interval(estimate)}"
    if verdict is VariantVerdict.UNDECIDED:
        if state.is_cut:
            reason = "not decided within the time"
        elif estimate.rounds < rules.looks[0]:
            reason = (
                f"Only {_rounds(estimate.rounds)}: results are evaluated from round "
                f"{rules.looks[0]} on."
            )
    return {
        "verdict": verdict,
        **_figures(estimate),
        "resolution": estimate.resolution,
        "rounds": estimate.rounds,
        "reason": reason,
        "text": text,
        "loss": loss_json(state, name),
    }


def impossible(reason: str) -> dict[str, Any]:
    verdict = {"verdict": VariantVerdict.IMPOSSIBLE, "reason": reason}
    nothing = verdict_json(ComparisonState(), "", Rules(looks=(2,), max_rounds=2), over=True)
    return nothing | verdict | {"text": f"unsupported: {reason}"}


def loss_json(state: ComparisonState, name: str) -> dict[str, Any]:
    """Return the verdict on the loss after equal steps, for sweep.json."""
    estimate = state.loss.get(name, _NOTHING)
    broken = state.broken.get(name, 0)
    verdict = _OF_LOSS[estimate.side]
    if broken:
        verdict = "worse"
        text = f"loss is NaN or infinite in {broken} of {_rounds(state.speed[name].rounds)}"
    elif estimate.effect is None:
        verdict, text = "undecided", "no loss to compare"
    elif estimate.side is Side.OPEN:
        text = f"loss not shown equal: {signed(estimate.effect)} {_interval(estimate)}"
    elif estimate.side is Side.SAME:
        text = f"loss equal within ±{percent(estimate.resolution)}"
    else:
        size = "higher" if verdict == "worse" else "lower"
        text = f"loss {size} by {percent(abs(estimate.effect))} {_sizes(estimate)}"
    return {"verdict": verdict, **_figures(estimate), "text": text}


def is_recommended(best: Mapping[str, Any] | None) -> bool:
    """Return True if the best combination of a sweep is faster and does not harm the loss."""
    if best is None:
        return False
    return bool(best["verdict"] == "faster" and best["loss"]["verdict"] != "worse")


def _figures(estimate: EffectEstimate) -> dict[str, float | None]:
    return {"effect": estimate.effect, "low": estimate.low, "high": estimate.high}


def percent(fraction: float | None) -> str:
    """Return a fraction in percent with one digit.

    >>> percent(0.1205), percent(80_000), percent(None)
    ('12.0%', 'above 1000%', '?')
    """
    if fraction is None:
        return "?"
    return f"{100 * fraction:.1f}%" if fraction <= MAX_EFFECT else f"above {100 * MAX_EFFECT:.0f}%"


def signed(fraction: float) -> str:
    """Return a fraction in percent with its sign.

    >>> signed(-0.012), signed(0)
    ('−1.2%', '+0.0%')
    """
    if fraction > MAX_EFFECT:
        return f"above +{100 * MAX_EFFECT:.0f}%"
    return f"{100 * fraction:+.1f}%".replace("-", "−")


def of_best(sweep: Mapping[str, Any]) -> str | None:
    """Return the result of the combination search as a sentence; None before its end."""
    best = sweep["best"]
    if best is not None:
        labels = {variant["name"]: variant["label"] for variant in sweep["variants"]}
        names = " + ".join(labels.get(name, name) for name in best["variants"])
        return f"{names}: {best['text']}; {best['loss']['text']}."
    if sweep["left_out"] and sweep["status"] == "finished":
        return "none: the loss of each faster setting is worse."
    return None


def summary(counts: Mapping[str, int]) -> str:
    """Return the number of variants by verdict, in the order of the verdicts.

    >>> summary({"slower": 1, "faster": 2})
    '2 faster, 1 slower'
    """
    return ", ".join(
        f"{counts[verdict]} {verdict.replace('_', ' ')}"
        for verdict in VariantVerdict
        if counts.get(verdict)
    )


def _decided(estimate: EffectEstimate) -> str:
    if estimate.side is Side.SAME:
        return f"no difference larger than {percent(estimate.resolution)}"
    effect = estimate.effect or 0.0
    way = "faster" if effect > 0 else "slower"
    return f"{way} by {percent(abs(effect))} {_sizes(estimate)}"


def _sizes(estimate: EffectEstimate) -> str:
    """Return the interval without signs."""
    low, high = sorted((abs(estimate.low or 0.0), abs(estimate.high or 0.0)))
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def _interval(estimate: EffectEstimate) -> str:
    return f"[{signed(estimate.low or 0.0)[:-1]}, {signed(estimate.high or 0.0)[:-1]}]"


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


HEADINGS = (
    *("setting", "verdict", "resolution", "samples/s", "step", "data wait", "peak"),
    *("loss", "rounds"),
)
NUMBERS = frozenset(HEADINGS) - {"setting", "verdict", "loss"}
"""Right-aligned columns."""
RATE = "samples/s"
_LAST = ("measuring", "undecided", "failed", "impossible")


def ordered(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the variants, the largest effect first and those without a verdict last."""

    def place(variant: Mapping[str, Any]) -> tuple[int, float]:
        behind = _LAST.index(variant["verdict"]) + 1 if variant["verdict"] in _LAST else 0
        return behind, -(variant["effect"] or 0.0)

    return sorted(sweep["variants"], key=place)


def rows(sweep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    baseline = sweep["baseline"]
    found: list[tuple[str, ...]] = [
        ("baseline", baseline["label"], "", *_metrics(baseline), "", str(baseline["rounds"]))
    ]
    for variant in ordered(sweep):
        resolution = variant["resolution"]
        found.append(
            (
                str(variant["name"]),
                str(variant["text"]),
                "" if resolution is None else percent(float(resolution)),
                *_metrics(variant),
                str(variant["loss"]["text"]) if variant["effect"] is not None else "",
                str(variant["rounds"]),
            )
        )
    return found


def _metrics(variant: Mapping[str, Any]) -> tuple[str, str, str, str]:
    metrics = variant["metrics"]
    rate, peak = metrics["samples_per_sec"], metrics["peak_allocated"]
    step, wait = (
        "" if metrics[name] is None else format_short_time(metrics[name])
        for name in ("step_time", "data_wait")
    )
    if rate is None:
        return "", step, wait, ""
    peak = metrics["peak_process"] if peak is None else peak
    return three_digits(rate), step, wait, format_bytes(peak)


def _unit(sweep: Mapping[str, Any]) -> str:
    """Return the unit of the rates: that of a script without a DataLoader is steps/s."""
    return str(sweep["machine"].get("rate", RATE))


def progress_line(sweep: Mapping[str, Any]) -> str:
    progress = sweep["progress"]
    left = progress["seconds_left"]
    text = f"[{progress['done']}/{progress['total']}] {progress['doing']}"
    if sweep["status"] == "running" and left is not None:
        text += f"; about {format_duration(left)} left"
    return printable(text)


def table(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table: headings, the baseline, and the variants by effect."""
    headings = tuple(_unit(sweep) if name == RATE else name for name in HEADINGS)
    cells = [headings, *rows(sweep)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return [
        printable(
            "  ".join(
                f"{cell:>{width}}" if heading in NUMBERS else f"{cell:<{width}}"
                for cell, width, heading in zip(row, widths, HEADINGS, strict=True)
            ).rstrip()
        )
        for row in cells
    ]


def closing(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines below the final table."""
    counts = Counter(str(variant["verdict"]) for variant in sweep["variants"])
    plan, best = sweep["plan"], of_best(sweep)
    lines = [
        f"{summary(counts) or 'No variant'}; {plan['steps']} steps per trial after "
        f"{plan['warmup']} warm-up steps, in fresh processes.",
        EFFECT.replace(RATE, _unit(sweep)),
    ]
    for variant in sweep["variants"]:
        if variant["reason"] and variant["reason"] not in variant["text"]:
            lines.append(f"{variant['name']}: {variant['reason']}")
    if best is not None:
        lines.append(f"Best combination: {best}")
    lines += [f"Not in it: {name}: {reason}." for name, reason in sweep["left_out"].items()]
    lines += [text for text in (sweep["throttled"], sweep["reason"]) if text]
    return [printable(line) for line in lines]
