"""The Compare page: metrics of several runs over one axis, their differences and figures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.charts.compare import RunLine, line_names, overlay
from dashboard.controls.run_picker import labels
from dashboard.format import escape_markdown, note, pick
from dashboard.services import Services
from dashboard.views import parts
from stepscope.common.files import modified_ns
from stepscope.common.formatting import printable
from stepscope.compare import comparison
from stepscope.compare.figures import RunFigures, read_figures, read_lines
from stepscope.compare.reports import run_report, scale_and_title
from stepscope.run import RUN_JSON, RunError, RunInfo, read_run
from stepscope.run.info import NOTES_JSON
from stepscope.store import STORE_NAME, StoreError

MAX_RUNS = 50
MAX_UNSCROLLED = 30  # rows of a table without a scroll bar
CHOSEN = "compare_runs"
AXES = {"step": "Step", "time": "Time since start (s)", "samples": "Samples"}
FIRST_METRICS = ("train/loss", "perf/step_time", "memory/allocated", "process/rss")
EACH = "each run"
OWN = "group of the runs"
Lines = dict[str, tuple[Any, Any, Any]]


@st.cache_data(max_entries=4 * MAX_RUNS, show_spinner=False)
def read(_run: RunInfo, folder: str, state: tuple[object, ...]) -> tuple[RunFigures, Lines]:
    """Return figures and lines of a run; a different `state` makes it be read again."""
    found = read_figures(_run)
    try:
        return found, read_lines(_run)
    except StoreError:  # `found.problem` has the reason
        return found, {}


def chosen_runs(server: Services) -> list[RunInfo]:
    """Draw the choice of runs, which the address has too; return those with a store here."""
    known = {run.id: run for run in server.run_list.fresh().runs}
    asked = st.query_params.get("runs", "").split(",")
    wanted = list(filter(None, dict.fromkeys(st.session_state.get(CHOSEN, asked))))
    if len(wanted) > MAX_RUNS:
        note("info", f"The first {MAX_RUNS} of {len(wanted)} runs are compared.")
    for name in wanted[:MAX_RUNS]:
        if name not in known:
            try:
                known[name] = read_run(server.folder(name))
            except RunError as error:
                note("error", escape_markdown(printable(str(error))))
    st.session_state[CHOSEN] = [name for name in wanted[:MAX_RUNS] if name in known]
    names = labels(known.values(), roots=server.roots)
    ids = st.multiselect(
        "Runs",
        list(names),
        key=CHOSEN,
        format_func=names.__getitem__,
        max_selections=MAX_RUNS,
        help=f"Up to {MAX_RUNS} runs.",
    )
    st.query_params["runs"] = ",".join(ids)
    found = []
    for run in map(known.__getitem__, ids):
        source = server.source_of(run)
        if source is not None:
            source.want(run.id)
        if source is None or (run.folder / STORE_NAME).exists():
            found.append(run)
        else:
            text = f"{run.id} is being loaded from {source.label}. Reload the page in a moment."
            note("cloud_download", escape_markdown(printable(text)))
    return found


def charts(each: Sequence[RunFigures], lines: Sequence[Lines], names: Sequence[str]) -> None:
    """Draw the selected metrics over one axis; several runs of one name are a group."""
    keys = list(dict.fromkeys(key for found in lines for key in found))
    first = [key for key in FIRST_METRICS if key in keys][:2]
    shown = st.multiselect("Metrics", keys, default=first, key="compare_metrics")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        axis = pick("Axis", AXES, "compare_axis", "Samples: steps times samples per step.")
        about = "Exponential moving average: the weight of all earlier points."
        weight = st.number_input("Smoothing", 0.0, 0.99, 0.0, key="compare_smoothing", help=about)
        log = st.toggle("Logarithmic", key="compare_log")
    for key in shown:
        drawn: dict[str, list[RunLine]] = {}
        size, title = scale_and_title(key)
        title = printable(title)
        for one, found, name in zip(each, lines, names, strict=True):
            scale = one.samples_per_step if axis == "samples" else 1.0
            if key in found and scale is not None:
                step, seconds, values = found[key]
                line = RunLine(seconds if axis == "time" else step * scale, values / size)
                drawn.setdefault(name, []).append(line)
        if drawn:
            figure = overlay(drawn, AXES[axis], title, weight, log=log)
            parts.plot(figure, f"compare_{key}", alt=f"{title} of {len(each)} runs")
        else:
            st.caption(f"No run has {escape_markdown(title)} over this axis.")


def tables(found: comparison.Comparison, names: Sequence[str], each: Sequence[RunFigures]) -> None:
    """Draw a table for each part of the comparison: a row per item, a column per run."""
    for part, title in comparison.PARTS.items():
        rows: list[dict[str, Any]] = []
        if part == "figures":
            head = [("Run", found.runs), ("Status", [str(one.run.status) for one in each])]
            rows = [{"Name": name} | dict(zip(names, cells, strict=True)) for name, cells in head]
        for row in getattr(found, part):
            rows.append({"Name": row.label} | dict(zip(names, row.cells(), strict=True)))
        st.markdown(f"#### {title}")
        if rows:
            columns = {"Name": parts.text(pinned=True, width="medium")}
            height: Any = "content" if len(rows) <= MAX_UNSCROLLED else parts.TABLE_HEIGHT
            parts.table(rows, columns, f"compare_{part}", f"{title} of the runs", height=height)
        else:
            st.caption("Not recorded." if part in ("phases", "memory") else "No difference.")


server = services.get()
st.page_link("views/runs.py", label="Runs", icon=":material/arrow_back:")
runs = chosen_runs(server)
if not runs:
    st.info("Choose runs to compare.", icon=":material/compare_arrows:")
    st.stop()
files = (RUN_JSON, NOTES_JSON, STORE_NAME, f"{STORE_NAME}-wal")
content = [
    read(run, str(run.folder), (run.status, *(modified_ns(run.folder / name) for name in files)))
    for run in runs
]
each = [figures for figures, _ in content]
lines = [found for _, found in content]
names = line_names(runs, comparison.compare_runs(each).configuration)
with st.container(horizontal=True):
    options = dict(enumerate(names))
    about = "Changes are relative to it. A run on other hardware has none."
    baseline = pick("Baseline", options, "compare_baseline", about)
    found = comparison.compare_runs(each, baseline)
    groups = {row.label: row for row in found.configuration}
    own = tuple(one.metadata.group for one in each)
    if any(own):
        groups = {OWN: comparison.ComparisonRow(OWN, "group", own)} | groups
    about = "A group is drawn as its mean, with a band from the lowest to the highest run."
    by = pick("Group by", [EACH, *groups], "compare_group", about)
    ordered = [runs[baseline], *(run for run in runs if run is not runs[baseline])]
    parts.report_button(functools.partial(run_report, ordered), "comparison", "compare_report")
if found.obstacles:
    parts.warning(f"{comparison.NOT_COMPARABLE} {' '.join(found.obstacles)}")
for text in found.notes:
    note("info", escape_markdown(text))
shown = names
if by != EACH:
    row = groups[by]
    shown = [
        # Runs without a group are not one; those without a setting have its default.
        name if by == OWN and row.text(index) is None else f"{row.label}: {row.shown(index)}"
        for index, name in enumerate(names)
    ]
charts(each, lines, shown)
tables(found, names, each)
diffs = {name: one.code_diff for name, one in zip(names, each, strict=True) if one.code_diff}
if diffs:
    name = pick("Uncommitted changes of", diffs.keys(), "compare_diff", "As recorded by git.")
    st.code(diffs[name], language="diff")
