"""The report of a sweep of the lab: verdicts, effects, drift and machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepscope.lab.report import HEADINGS, closing, ordered, rows
from stepscope.report.page import Report, untrusted_content
from stepscope.report.run_report import values_of
from stepscope.report.scrubber import scrubber_of
from stepscope.report.svg import Line, line_chart


@untrusted_content()
def sweep_report(sweep: Mapping[str, Any], *, full: bool = False) -> str:
    """Return the page of the content of sweep.json, as `read_sweep` returns it.

    Without `full` it has no host names, user names, addresses and paths. Raises ReportError.
    """
    scrub = str if full else scrubber_of((), (sweep, sweep["machine"]))
    report = Report(f"Sweep report: {sweep['workload']}", scrub)
    report.heading(report.scrub(str(sweep["id"])), 2)
    report.paragraph(f"Status: {sweep['status']}. {sweep['reason'] or ''}")
    report.table("Verdicts", HEADINGS, rows(sweep))
    effects: list[Line] = [("", np.zeros(2), np.array([0.0, 1.0]))]
    names: dict[float, str] = {}
    for arm in reversed(ordered(sweep)):
        if None not in (ends := [arm[name] for name in ("low", "effect", "high")]):
            names[len(effects)] = report.scrub(str(arm["name"]))
            low, effect, high = np.clip(100 * np.array(ends, float), -100, 1000)
            mark = len(effects) + np.array([0, 0, 0.2, -0.2, 0, 0])
            effects.append(("", np.array([low, *4 * [effect], high]), mark))
    effects[0][2][1] = len(effects)  # from the bottom to the top
    if names:
        x_label = "effect on throughput, %; the mark is the estimate, the line its interval"
        report.parts.append(line_chart("Effect of each variant", x_label, effects, names))
    for line in closing(sweep):
        report.paragraph(line)
    report.table("Machine", ("name", "value"), values_of(sweep["machine"], full))
    return report.html()
