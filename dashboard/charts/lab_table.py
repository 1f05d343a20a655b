"""The table of a sweep as HTML: a row a setting, sorted by effect; pure.

HTML, not a data frame: reasons wrap, figures align, a screen reader reads it, and the row of a
setting keeps its place while others fill. Every text in it is escaped: folders come from others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from dashboard.charts.lab import WORDS, by_effect, interval, percent
from dashboard.sweep_content import Arm, SweepContent, Verdict
from stepscope.common.formatting import format_bytes

NOTHING = "–"
_NO_FIGURES = (Verdict.FAILED, Verdict.IMPOSSIBLE)


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell: a figure, and in a second, smaller line what belongs to it."""

    main: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, what it means, its cell for an arm, and what it is made of."""

    title: str
    help: str
    cell: Callable[[Arm], Cell]
    needs: tuple[str, ...] = ()
    """Metrics of which at least one must be there, in any arm, for the column to be drawn."""


def columns_for(arms: Sequence[Arm]) -> list[Column]:
    """Return the columns that have something to show for these arms."""
    known = {name for arm in arms for name in arm.metrics}
    columns = [c for c in COLUMNS if not c.needs or known.intersection(c.needs)]
    if not any(arm.loss_verdict for arm in arms):
        columns = [column for column in columns if column.title != "Loss"]
    return columns


def rows(sweep: SweepContent) -> list[Arm]:
    """Return what the table lists: the best combination, the baseline, then arms by effect."""
    best = [sweep.best.arm] if sweep.best is not None else []
    return [*best, sweep.baseline, *by_effect(sweep.arms)]


def table_html(sweep: SweepContent) -> str:
    """Return the table; a row that failed or cannot be has its reason across all columns."""
    arms = rows(sweep)
    columns = columns_for(arms)
    head = "".join(
        f'<th scope="col" title="{escape(column.help)}">{escape(column.title)}</th>'
        for column in columns
    )
    body = "".join(_row(arm, columns) for arm in arms)
    # A box that scrolls must be reached by keyboard: the table is a stop of the Tab key.
    return (
        '<table class="lab-table" tabindex="0" aria-label="Settings by effect">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def absent_sentence(sweep: SweepContent) -> str | None:
    """Say once which measurements this machine does not give; None where all are there."""
    arms = rows(sweep)
    if not any(arm.metrics for arm in arms):
        return None
    missing = [
        words
        for words, metric in (
            ("allocated and reserved memory", "peak_allocated"),
            ("energy", "energy_per_sample"),
        )
        if not any(metric in arm.metrics for arm in arms)
    ]
    if not missing:
        return None
    names = " and no ".join(missing)
    if sweep.config.get("device") == "cpu":
        return f"Not available on CPU: {names}."
    return f"This GPU or its driver gives no {names}."


def _row(arm: Arm, columns: Sequence[Column]) -> str:
    kind = arm.verdict.value if arm.verdict is not None else "baseline"
    named, *others = (column.cell(arm) for column in columns)
    head = f'<th scope="row">{_cell(named)}</th>'
    if arm.verdict in _NO_FIGURES:
        word = _marked(arm)
        reason = f'<span class="lab-reason">{escape(arm.reason or "No reason is known.")}</span>'
        cells = f'<td>{word}</td><td colspan="{len(columns) - 2}">{reason}</td>'
    else:
        first, *rest = others
        cells = f"<td>{_marked(arm)}{_detail(first.detail)}</td>"
        cells += "".join(f'<td class="lab-figure">{_cell(cell)}</td>' for cell in rest)
    return f'<tr class="lab-row-{kind}" data-arm="{escape(arm.name)}">{head}{cells}</tr>'


def _cell(cell: Cell) -> str:
    return f"{escape(cell.main)}{_detail(cell.detail)}"


def _detail(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def _marked(arm: Arm) -> str:
    """Return the verdict as a word with its mark: never by color alone."""
    if arm.verdict is None:
        return "baseline"
    mark = f'<span class="lab-mark lab-{arm.verdict.value}" aria-hidden="true"></span>'
    return f'<span class="lab-verdict">{mark}{WORDS[arm.verdict]}</span>'


def _setting(arm: Arm) -> Cell:
    return Cell(arm.label) if arm.verdict is not None else Cell("Baseline", arm.label)


def _verdict(arm: Arm) -> Cell:
    return Cell(WORDS[arm.verdict] if arm.verdict else "baseline", arm.reason or "")


def _effect(arm: Arm) -> Cell:
    if arm.verdict is None:
        return Cell(NOTHING)
    return Cell(percent(arm.effect), interval(arm.low, arm.high))


def _resolution(arm: Arm) -> Cell:
    return Cell(percent(arm.resolution, signed=False))


def _rounds(arm: Arm) -> Cell:
    return Cell(str(arm.rounds) if arm.rounds else NOTHING)


def _rate(arm: Arm) -> Cell:
    value = arm.metrics.get("samples_per_sec")
    return Cell(NOTHING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}")


def _step(arm: Arm) -> Cell:
    parts = {"wait": "data_wait", "copy": "h2d", "GPU": "gpu_time"}
    split = [
        f"{word} {milliseconds(arm.metrics[name])}"
        for word, name in parts.items()
        if name in arm.metrics
    ]
    step = arm.metrics.get("step_time")
    return Cell(NOTHING if step is None else f"{milliseconds(step)} ms", " · ".join(split))


def _memory(arm: Arm) -> Cell:
    allocated, reserved, process = (
        arm.metrics.get(name) for name in ("peak_allocated", "peak_reserved", "peak_process")
    )
    if allocated is not None:
        detail = "" if reserved is None else f"reserved {format_bytes(reserved)}"
        return Cell(format_bytes(allocated), detail)
    return Cell(NOTHING if process is None else format_bytes(process))


def _energy(arm: Arm) -> Cell:
    joules = arm.metrics.get("energy_per_sample")
    if joules is None:
        return Cell(NOTHING)
    return Cell(f"{joules:.3g} J" if joules >= 1 else f"{1000 * joules:.3g} mJ")


def _share_of_peak(arm: Arm) -> Cell:
    return Cell(percent(arm.metrics.get("mfu"), signed=False))


def _loss(arm: Arm) -> Cell:
    value = arm.metrics.get("loss")
    word = arm.loss_verdict
    if arm.verdict is None or word is None:
        return Cell(NOTHING if value is None else f"{value:.3g}")
    return Cell(word.replace("_", " "), "" if value is None else f"{value:.3g}")


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with three digits, without the unit.

    >>> milliseconds(0.01234), milliseconds(1.5)
    ('12.3', '1,500')
    """
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS: tuple[Column, ...] = (
    Column("Setting", "What differs from the baseline.", _setting),
    Column(
        "Verdict",
        "By Student's t on log ratios to the baseline of each round, with one level for all "
        "settings and looks.",
        _verdict,
    ),
    Column("Effect", "Throughput relative to the baseline, with confidence interval.", _effect),
    Column(
        "Margin of error",
        "How far the true effect may be from the verdict: from the effect if faster or slower, "
        "otherwise from 0.",
        _resolution,
    ),
    Column("Rounds", "Rounds in which this setting and the baseline were measured.", _rounds),
    Column("Samples/s", "Median over the rounds.", _rate, ("samples_per_sec",)),
    Column(
        "Step",
        "Median step time; below it data wait, H2D copy and GPU time, in ms.",
        _step,
        ("step_time",),
    ),
    Column(
        "Peak memory",
        "Highest allocated memory, and reserved by the allocator; on a CPU the memory of the "
        "process.",
        _memory,
        ("peak_allocated", "peak_process"),
    ),
    Column("Energy", "GPU energy per sample.", _energy, ("energy_per_sample",)),
    Column(
        "MFU", "Share of the device's peak FLOP/s that the model used.", _share_of_peak, ("mfu",)
    ),
    Column(
        "Loss",
        "Loss after equal steps against the baseline's. Same: its 95 % interval lies within ±3 %. "
        "Not shown equal: it does not, and the loss may differ.",
        _loss,
    ),
)
