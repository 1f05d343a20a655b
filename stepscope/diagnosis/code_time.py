"""Where the time of a training goes, by line of the script: shares of samples. Pure; no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.session.training_facts import CodeLine, TrainingFacts

MIN_SAMPLES = 20  # of a share that a sentence names
MIN_SHARE_SHOWN, MAX_ROWS = 0.01, 12  # of the table
MAX_CALL_CHARS = 40
ERROR_QUANTILE = 1.96  # of a 95% interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShare:
    """One line of the table: `share` of the time, within `error` at 95%; both are fractions."""

    phase: str
    place: str  # file and line
    call: str
    below: str
    share: float
    error: float
    asleep: float  # fraction of this line's time

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Share with its error, phase, file and line, call, and the function below."""
        share = f"{self.share:.0%} ± {self.error:.0%}"
        return share, self.phase or "between", self.place, self.call, self.below


TABLE = "Where the time goes"


def table_note(facts: TrainingFacts) -> str:
    """Return what the numbers of the table are."""
    return (
        f"{sample_count(facts):,} samples of the training thread during its steps, ten a second; "
        "± is the 95% interval. Workers of a DataLoader are other processes, and not in it."
    )


def sample_count(facts: TrainingFacts) -> int:
    """Return the number of samples of the training thread."""
    return sum(period.samples for period in facts.periods)


def delay_share(facts: TrainingFacts) -> float:
    """Return the fraction of the time in which the thread was ready to run, without a core."""
    wall_s = sum(period.wall_s for period in facts.periods)
    return sum(period.delay_s for period in facts.periods) / wall_s if wall_s else 0.0


def is_python_code(line: CodeLine) -> bool:
    """Return True for Python code up to a call, which is not of a loader."""
    return line.before and line.phase != "data"


def line_shares(facts: TrainingFacts) -> list[LineShare]:
    """Return the lines of the table, the largest share first."""
    total = sample_count(facts)
    rows = []
    for line in facts.lines:
        count = sum(line.counts)
        share = count / total if total else 0.0
        if share >= MIN_SHARE_SHOWN:
            rows.append(
                LineShare(
                    phase=line.phase,
                    place=f"{line.file}:{line.line}",
                    call=short_call(line),
                    below="Python code up to it" if line.before else line.below,
                    share=share,
                    error=ERROR_QUANTILE * math.sqrt(share * (1 - share) / total),
                    asleep=line.asleep / count,
                )
            )
    return sorted(rows, key=lambda row: -row.share)[:MAX_ROWS]


def short_call(line: CodeLine) -> str:
    """Return the call without long arguments.

    >>> line = CodeLine(phase="", file="t.py", line=1, source="", below="", in_torch=False,
    ...     counts=[], call="writer.add_histogram(name, parameter, global_step)")
    >>> short_call(line)
    'writer.add_histogram(…)'
    """
    call = line.call or line.source
    if len(call) <= MAX_CALL_CHARS:
        return call
    name = call.partition("(")[0]
    return (
        f"{name}(…)" if len(name) <= MAX_CALL_CHARS and "(" in call else f"{call[:MAX_CALL_CHARS]}…"
    )


def share_of(facts: TrainingFacts, lines: Sequence[CodeLine]) -> tuple[float, CodeLine | None]:
    """Return the share of the samples in these lines, and the largest of them."""
    total = sample_count(facts)
    if not lines or total < MIN_SAMPLES:
        return 0.0, None
    largest = max(lines, key=lambda line: sum(line.counts))
    return min(1.0, sum(sum(line.counts) for line in lines) / total), largest


def reaches(facts: TrainingFacts, share: float, least: float) -> bool:
    """Return True if a share less its standard error is at least `least`: not by chance."""
    return share - math.sqrt(share * (1 - share) / max(1, sample_count(facts))) >= least


def line_text(line: CodeLine) -> str:
    """Return file, line and call as a sentence quotes them."""
    where = "Python code up to " if line.before else ""
    return f"{where}{line.file}:{line.line} {short_call(line)}"


def line_that_grew(facts: TrainingFacts) -> CodeLine | None:
    """Return the line whose time per step grew most from the first to the last third."""
    periods = facts.periods
    third = len(periods) // 3
    if not third:
        return None
    first_steps = periods[third - 1].step - periods[0].step + 1
    last_steps = periods[-1].step - periods[-third - 1].step
    if last_steps <= 0:
        return None

    def growth(line: CodeLine) -> float:
        return sum(line.counts[-third:]) / last_steps - sum(line.counts[:third]) / first_steps

    grown = [line for line in facts.lines if len(line.counts) == len(periods)]
    largest = max(grown, key=growth, default=None)
    return largest if largest is not None and growth(largest) > 0 else None
