"""The reports of runs, and of a sweep of the lab, from their folders, which may be foreign."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from stepscope.common.files import read_tail
from stepscope.common.formatting import format_duration, printable
from stepscope.common.json_values import dict_of
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.compare.comparison import NOT_COMPARABLE, PARTS, Comparison, compare_runs
from stepscope.compare.figures import RunFigures, read_figures, read_lines
from stepscope.compare.report_page import (
    COLORS,
    MAX_BLOCK,
    Line,
    Report,
    line_chart,
    untrusted_content,
)
from stepscope.compare.scrubber import scrubber_of
from stepscope.diagnosis.code_time import TABLE, line_shares, table_note
from stepscope.diagnosis.findings import (
    RunData,
    findings,
    nothing_to_say,
    read_recorded,
    shortage,
)
from stepscope.distributed.hangs.record import read_record
from stepscope.lab.verdict_text import HEADINGS, closing
from stepscope.lab.verdict_text import rows as verdict_rows
from stepscope.run import RunInfo, RunStatus, rank_file
from stepscope.store.blocks import Floats

MAX_EVENTS = 200
MAX_RANKS = 16
MAX_ROWS = 300
MAX_DETAILED_RUNS = 10  # about 90 kB each
_CHARTS = {
    "Loss": ("train/loss", "val/loss"),
    "GPU memory (GiB)": ("memory/allocated", "memory/reserved", "memory/peak_allocated"),
    "Host memory of the process (GiB)": ("process/rss", "process/peak_rss"),
    "Utilization (%)": ("gpu/util", "host/cpu"),
    "Step time (ms)": (
        "perf/step_time",
        "perf/data_wait",
        "perf/forward",
        "perf/backward",
        "perf/optimizer",
        "perf/gpu_time",
    ),
    "Throughput (1/s)": ("perf/samples_per_sec",),
}
_HOST = "host"  # of an environment: a short or common name remains in a scrubbed text
MAX_OWN_CHARTS = 8  # of the script's own metrics
_SCALES = {Unit.BYTES: (2.0**30, "GiB"), Unit.SECOND: (1e-3, "ms")}
Lines = Mapping[str, tuple[Floats, Floats, Floats]]


@untrusted_content()
def run_report(runs: Sequence[RunInfo], *, full: bool = False) -> str:
    """Return the page of runs; of several, a comparison with the first one precedes them.

    Without `full` it has no host names, user names, addresses and paths. Raises ReportError.
    """
    names = [str(run.run_json.get("name") or run.id) for run in runs]
    title = f"Training report: {', '.join(dict.fromkeys(names))}"
    report = Report(title, str if full else scrubber_of(runs))
    each = [read_figures(run) for run in runs]
    if len(each) > 1:
        names = [f"{number} · {name}" for number, name in enumerate(names, 1)]
        found = compare_runs(each)
        report.heading("Comparison", 2)
        text = "Changes are relative to the first run. A run on other hardware has none."
        report.paragraph(text, "note")
        if found.obstacles:
            report.paragraph(f"{NOT_COMPARABLE} {' '.join(found.obstacles)}", "verdict")
        report.paragraph(" ".join(found.notes), "note")
        if len(each) <= COLORS:
            _add_overlays(report, each, names)
        _tables(report, found, names, full)
    # The comparison has the problem of a run without a store.
    named = zip(each, names, strict=True)
    detailed = [pair for pair in named if len(each) == 1 or pair[0].problem is None]
    if len(detailed) > MAX_DETAILED_RUNS:
        text = f"Only the first {MAX_DETAILED_RUNS} of {len(detailed)} runs have details."
        report.paragraph(text, "note")
    for one, name in detailed[:MAX_DETAILED_RUNS]:
        _add_run(report, one, name, full)
    return report.html()


def _tables(report: Report, found: Comparison, names: Sequence[str], full: bool) -> None:
    for part, title in PARTS.items():
        rows = [
            (row.label, *row.cells())
            for row in getattr(found, part)
            if full or not (row.key == _HOST or row.key.startswith("script "))
        ]
        report.table(title, ("name", *names), rows)


def _add_run(report: Report, figures: RunFigures, name: str, full: bool) -> None:
    run, run_json = figures.run, figures.run.run_json
    recorded, lines = read_recorded(run), read_lines(run)
    report.heading(report.scrub(name), 2)
    git = figures.metadata.git
    rows = [
        ("run", run.id),
        ("status", run.status.value),
        ("reason", run.reason),
        ("started (UTC)", time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.created))),
        ("processes", run_json.get("world_size") or 1),
        ("GPU", dict_of(run_json.get("environment")).get("gpu")),
        ("commit", git and git.text),
        ("group", figures.metadata.group),
        ("tags", ", ".join(figures.metadata.tags)),
    ]
    report.table("Summary", ("property", "value"), [row for row in rows if row[1]])
    report.block(figures.metadata.note or "", "Note")
    report.heading("Diagnosis")
    found = findings(recorded)
    for finding in found:
        report.paragraph(f"{finding.text} {finding.next or ''}", "verdict")
    if not found:
        report.paragraph(nothing_to_say(recorded), "verdict")
    for rank in recorded.ranks[:MAX_RANKS]:
        if rank.facts is not None:
            of_rank = f", rank {rank.number}" if len(recorded.ranks) > 1 else ""
            shares = [row.cells for row in line_shares(rank.facts)]
            headings = ("share", "phase", "line", "call", "function below")
            report.table(f"{TABLE}{of_rank}", headings, shares)
            report.paragraph(table_note(rank.facts) if shares else None, "note")
    _add_failure(report, recorded)
    _tables(report, compare_runs([figures]), ("value",), full)
    _add_charts(report, lines)
    events = [event for rank in recorded.ranks[:MAX_RANKS] for event in rank.events]
    shown = [
        (format_duration(max(0.0, one.ts - run.created)), one.step, one.kind, one.text)
        for one in sorted(events, key=lambda one: one.ts)[-MAX_EVENTS:]
    ]
    report.table("Events", ("time", "step", "kind", "event"), shown)
    properties = {"Environment": "environment", "Configuration": "config"}
    if full:
        properties |= {"Script": "script", "Slurm job": "slurm"}
    for title, key in properties.items():
        report.table(title, ("name", "value"), values_of(run_json.get(key), full=full))


def _add_failure(report: Report, recorded: RunData) -> None:
    run = recorded.run
    for rank in recorded.ranks[:MAX_RANKS]:
        short = shortage(recorded, rank)
        if short is not None:
            report.table("Out of memory", ("evidence", "value"), short.finding.evidence.items())
            last = short.report.last
            texts = (*last.stack, last.message or "")
            report.block("\n".join(texts), "Failed allocation")
    if recorded.hang is None and run.status not in (RunStatus.FAILED, RunStatus.CRASHED):
        return
    for rank in recorded.ranks[:MAX_RANKS]:
        record = read_record(run.folder, rank.number)
        if record is not None:
            state = record.phase or record.doing or "unknown"
            stack = (f"{one.file}:{one.line} in {one.function}" for one in record.frames)
            title = f"Rank {record.rank}: step {record.step}, phase {state}"
            report.block("\n".join(stack) or "No stack was recorded.", title)
            report.paragraph(record.collectives_reason, "note")
    for name in (rank_file("traceback.txt", run.cause), "output.log"):
        with suppress(OSError):  # most runs do not have both
            report.block(read_tail(run.folder / name, MAX_BLOCK), f"End of {name}")


def _add_overlays(report: Report, each: Sequence[RunFigures], names: Sequence[str]) -> None:
    pairs = zip(names, each, strict=True)
    lines = [(report.scrub(name), read_lines(one.run)) for name, one in pairs if not one.problem]
    for key in ("train/loss", "perf/step_time"):
        scale, title = scale_and_title(key)
        drawn: list[Line] = [
            (name, found[key][0], found[key][2] / scale) for name, found in lines if key in found
        ]
        report.parts.append(line_chart(title, "step", drawn))


def _add_charts(report: Report, lines: Lines) -> None:
    longest = max((float(seconds[-1]) for _, seconds, _ in lines.values()), default=0.0)
    scales = ((3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((one for one in scales if longest > 3 * one[0]), scales[-1])
    own = [key for key in lines if key not in BY_KEY][:MAX_OWN_CHARTS]
    for title, keys in (_CHARTS | {scale_and_title(key)[1]: (key,) for key in own}).items():
        scale, _ = scale_and_title(keys[0])
        drawn: list[Line] = []
        for key in filter(lines.__contains__, keys):
            _, x, y = lines[key]
            label = BY_KEY[key].label if key in BY_KEY else key
            drawn.append((report.scrub(printable(label)), x / size, y / scale))
        title = report.scrub(printable(title))
        report.parts.append(line_chart(title, f"time since the start, {unit}", drawn))


def scale_and_title(key: str) -> tuple[float, str]:
    """Return the size of a chart's unit in that of the metric, and the title with the unit.

    >>> scale_and_title("perf/step_time"), scale_and_title("eval/f1")
    ((0.001, 'Step time (ms)'), (1.0, 'eval/f1'))
    """
    if key not in BY_KEY:
        return 1.0, key
    label, stored = BY_KEY[key].label, BY_KEY[key].unit
    label = label[:1].upper() + label[1:]
    scale, unit = _SCALES.get(stored, (1.0, stored.value))
    return scale, f"{label} ({unit})" if unit else label


def values_of(values: object, *, full: bool = True) -> Iterator[tuple[str, str | None]]:
    """Yield the rows of an object of JSON, that of the host only if `full`."""
    entries = list(dict_of(values).items())
    for name, value in entries[:MAX_ROWS]:
        if name == _HOST and not full:
            continue
        if name == "commit" and value is None:
            continue  # of a script: it is in the summary
        yield name, value if value is None or isinstance(value, str) else json.dumps(value)
    if len(entries) > MAX_ROWS:
        yield "…", f"{len(entries) - MAX_ROWS:,} more are not shown"


@untrusted_content()
def sweep_report(sweep: Mapping[str, Any], *, full: bool = False) -> str:
    """Return the page of `read_sweep`'s result; `full` as in `run_report`. Raises ReportError."""
    scrub = str if full else scrubber_of((), (sweep, sweep["machine"]))
    report = Report(f"Sweep report: {sweep['workload']}", scrub)
    report.heading(report.scrub(str(sweep["id"])), 2)
    report.paragraph(f"Status: {sweep['status']}. {sweep['reason'] or ''}")
    report.table("Verdicts", HEADINGS, verdict_rows(sweep))
    for line in closing(sweep):
        report.paragraph(line)
    report.table("Machine", ("name", "value"), values_of(sweep["machine"], full=full))
    return report.html()
