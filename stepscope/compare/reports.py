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
from stepscope.diagnosis.classify import BottleneckKind
from stepscope.diagnosis.findings import RankData, RunData, findings, nothing_to_say, read_recorded
from stepscope.distributed.hangs.record import read_record
from stepscope.lab.report import HEADINGS, closing
from stepscope.lab.report import rows as verdict_rows
from stepscope.memory.oom.reader import diagnose_run
from stepscope.run import RunInfo, rank_file
from stepscope.store.blocks import Floats

MAX_EVENTS = 200
MAX_RANKS = 16
MAX_ENTRIES = 30
MAX_ROWS = 300
MAX_NAMES = 8  # in the title
MAX_DETAILED_RUNS = 10  # about 90 kB each
_CHARTS = {
    "Loss": ("train/loss", "val/loss"),
    "GPU memory": ("memory/allocated", "memory/reserved", "memory/peak_allocated"),
    "Host memory of the process": ("process/rss", "process/peak_rss"),
    "Utilization": ("gpu/util", "host/cpu"),
    "Step time": (
        "perf/step_time",
        "perf/data_wait",
        "perf/forward",
        "perf/backward",
        "perf/optimizer",
        "perf/gpu_time",
    ),
    "Throughput": ("perf/samples_per_sec",),
}
MAX_OWN_CHARTS = 8  # of the script's own metrics
_SCALES = {Unit.BYTES: (2.0**30, "GiB"), Unit.SECOND: (1e-3, "ms"), Unit.PER_SECOND: (1.0, "1/s")}
_PRIVATE = {
    "host",
    "user",
    "pid",
    "pid_namespace",
    "cwd",
    "dataset",
    "resume_from",
    "script path",
    "script arguments",
}
_PROPERTIES = {
    "Environment": "environment",
    "Configuration": "config",
    "Script": "script",
    "Slurm job": "slurm",
}
Lines = Mapping[str, tuple[Floats, Floats, Floats]]


@untrusted_content()
def run_report(runs: Sequence[RunInfo], *, full: bool = False) -> str:
    """Return the page of runs; of several, a comparison with the first one precedes them.

    Without `full` it has no host names, user names, addresses and paths. Raises ReportError.
    """
    names = [str(run.run_json.get("name") or run.id) for run in runs]
    subject = ", ".join(dict.fromkeys(names)) if len(runs) <= MAX_NAMES else f"{len(runs)} runs"
    report = Report(f"Training report: {subject}", str if full else scrubber_of(runs))
    each = [read_figures(run) for run in runs]
    if len(each) > 1:
        names = [f"{number} · {name}" for number, name in enumerate(names, 1)]
        found = compare_runs(each)
        report.heading("Comparison", 2)
        text = "Changes are relative to the first run. A run on other hardware has none."
        report.paragraph(text, "note", fixed=True)
        if found.obstacles:
            report.paragraph(f"{NOT_COMPARABLE} {' '.join(found.obstacles)}", "verdict")
        report.paragraph(" ".join(found.notes), "note")
        if len(each) <= COLORS:
            _add_overlays(report, each, names)
        _tables(report, found, names, full)
    # The comparison has the problem of a run without a store.
    detailed = [at for at, one in enumerate(each) if len(each) == 1 or one.problem is None]
    if len(detailed) > MAX_DETAILED_RUNS:
        text = f"Only the first {MAX_DETAILED_RUNS} of {len(detailed)} runs have details."
        report.paragraph(text, "note", fixed=True)
    for at in detailed[:MAX_DETAILED_RUNS]:
        _add_run(report, each[at], names[at], full)
    return report.html()


def _tables(report: Report, found: Comparison, names: Sequence[str], full: bool) -> None:
    for part, title in PARTS.items():
        rows = [
            (row.label, row.cells())
            for row in getattr(found, part)
            if full or row.key.rpartition(".")[2] not in _PRIVATE
        ]
        report.table(title, ("name", *names), [(label, *texts) for label, texts in rows])


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
        text, fixed = f"{finding.text} {finding.next or ''}", finding.kind in {*BottleneckKind}
        report.paragraph(text, "verdict", fixed=fixed)
    if not found:
        report.paragraph(nothing_to_say(recorded), "verdict", fixed=True)
    _add_failure(report, recorded)
    _tables(report, compare_runs([figures]), ("value",), full)
    _add_charts(report, lines)
    events = [event for rank in recorded.ranks[:MAX_RANKS] for event in rank.events]
    shown = [
        (format_duration(max(0.0, one.ts - run.created)), one.step, one.kind, one.text)
        for one in sorted(events, key=lambda one: one.ts)[-MAX_EVENTS:]
    ]
    report.table("Events", ("time", "step", "kind", "event"), shown)
    for title, name in _PROPERTIES.items():
        if title in ("Script", "Slurm job") and not full:
            continue
        report.table(title, ("name", "value"), values_of(run_json.get(name), full))


def _add_failure(report: Report, recorded: RunData) -> None:
    run, hang = recorded.run, recorded.hang
    if hang is not None:
        rows = {
            "waiting ranks": ", ".join(map(str, hang.waiting[:MAX_ROWS])),
            "wait for ranks": ", ".join(map(str, hang.ranks[:MAX_ROWS])),
            "operation": hang.operation,
            "phase": hang.phase,
            "last step": str(hang.step),
        }
        values = [(name, value or "unknown") for name, value in rows.items()]
        report.table("Hang", ("property", "value"), values)
    for rank in recorded.ranks[:MAX_RANKS]:
        _add_out_of_memory(report, run, rank)
    if hang is None and str(run.status) not in ("failed", "crashed"):
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


def _add_out_of_memory(report: Report, run: RunInfo, rank: RankData) -> None:
    try:
        short = diagnose_run(run, rank.number)
    except (OSError, ValueError) as error:
        report.paragraph(f"The record of failed allocations cannot be read: {error}", "note")
        return
    if short is not None:
        report.table("Out of memory", ("evidence", "value"), short.finding.evidence.items())
        for step in short.finding.recommendations:
            report.paragraph(f"{step.text} {step.code or ''}")
        last = short.report.last
        texts = (*last.stack[:MAX_ENTRIES], last.message or "")
        report.block("\n".join(texts), "Failed allocation")


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
    for title, keys in (_CHARTS | {key: (key,) for key in own}).items():
        scale, y_unit = _scale_and_unit(keys[0])
        drawn: list[Line] = []
        for key in filter(lines.__contains__, keys):
            _, x, y = lines[key]
            label = BY_KEY[key].label if key in BY_KEY else report.scrub(printable(key))
            drawn.append((label, x / size, y / scale))
        title = f"{title}, {y_unit}" if y_unit else title
        title = title if keys[0] in BY_KEY else report.scrub(printable(title))
        report.parts.append(line_chart(title, f"time since the start, {unit}", drawn))


def _scale_and_unit(key: str) -> tuple[float, str]:
    unit = BY_KEY[key].unit if key in BY_KEY else Unit.NONE
    return _SCALES.get(unit, (1.0, unit.value))


def scale_and_title(key: str) -> tuple[float, str]:
    """Return the size of a chart's unit in that of the metric, and the title with the unit.

    >>> scale_and_title("perf/step_time"), scale_and_title("eval/f1")
    ((0.001, 'Step time (ms)'), (1.0, 'eval/f1'))
    """
    scale, unit = _scale_and_unit(key)
    if key not in BY_KEY:
        return scale, key
    label = BY_KEY[key].label
    label = label[:1].upper() + label[1:]
    return scale, f"{label} ({unit})" if unit else label


def values_of(values: object, full: bool) -> Iterator[tuple[str, str | None]]:
    """Yield the rows of an object of JSON, without private values unless `full`."""
    entries = list(dict_of(values).items())
    for name, value in entries[:MAX_ROWS]:
        if name == "commit" and value is None:
            continue  # of a script: it is in the summary
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        yield name, "[removed]" if not full and name in _PRIVATE and value else text
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
    report.table("Machine", ("name", "value"), values_of(sweep["machine"], full))
    return report.html()
