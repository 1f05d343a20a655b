"""The Collectives tab: settings of a measurement, its progress, and the kept results."""

from __future__ import annotations

import functools
from typing import Any

import streamlit as st

from dashboard.charts.collectives import SHOWN, figure, table_rows
from dashboard.format import escape_markdown
from dashboard.services import ServerActivity, Services
from dashboard.views.parts import plot, start_button, table
from stepscope.common.formatting import format_bytes
from stepscope.run import RunError
from trainer.collectives.measurement import (
    ResultError,
    closing,
    read_result,
    result_label,
    result_names,
)
from trainer.collectives.plan import (
    GLOO,
    KIB,
    MAX_RANKS,
    NCCL,
    OPERATIONS,
    CollectivePlan,
    PlanError,
    refusal,
    sizes_between,
)
from trainer.runners.child_process import ChildState

LOOK_S, AGAIN_S = 0.5, 5.0
"""How often the results are read: while a measurement is at work, and while none is."""
READING_WIDTH = 820  # Pixels of the widest line of text that is read with ease.
LARGEST = tuple(size * 2**20 for size in (1, 4, 16, 64, 256, 1024))
number = st.column_config.NumberColumn
COLUMNS = {
    "Operation": st.column_config.TextColumn(pinned=True),
    "Time": number(format="%,.1f µs"),
    "Slowest / fastest": number(format="%.1f"),
    "Algorithm": number(format="%.3g GB/s"),
    "Bus": number(format="%.3g GB/s"),
    "Reason": st.column_config.TextColumn(width="large"),
}
NAMES = {GLOO: "gloo (CPUs)", NCCL: "nccl (GPUs)"}


def introduction() -> None:
    """Draw what the tab measures."""
    st.markdown("### Collectives")
    st.container(width=READING_WIDTH).markdown(
        "Speed of collective operations between processes on this machine, by operation and size. "
        "**Algorithm bandwidth** is size divided by time. **Bus bandwidth** is the traffic of one "
        "link, independent of the number of ranks: compare it with the link's specification. Small "
        "sizes show latency, large sizes show bandwidth."
    )


def choice(server: Services) -> None:
    """Draw the settings, and the button that starts or stops."""
    found = server.devices()
    gpus = sum(1 for one in found.devices if one.cuda_index is not None)
    try:
        plan = _plan(gpus)
        refused = refusal(plan, gpus, found.cuda_reason)
    except PlanError:
        plan, refused = CollectivePlan(), "Select at least one operation."
    _start_button(server, plan, refused)


def _plan(gpus: int) -> CollectivePlan:
    """Draw the settings of a measurement. Raises PlanError for those that make none."""
    columns = st.columns([2, 2, 2, 4])
    backend = columns[0].selectbox(
        "Backend",
        list(NAMES),
        index=1 if gpus > 1 else 0,
        format_func=NAMES.__getitem__,
        key="collectives_backend",
        help="gloo transfers CPU tensors, NCCL GPU tensors (one GPU per rank).",
    )
    ranks = columns[1].number_input(
        "Ranks",
        min_value=2,
        max_value=MAX_RANKS,
        value=min(MAX_RANKS, max(2, gpus)),
        key="collectives_ranks",
        help="Number of processes. With gloo, more processes than CPU cores slow each other down.",
    )
    largest = columns[2].selectbox(
        "Largest size",
        LARGEST,
        index=2,
        format_func=format_bytes,
        key="collectives_largest",
        help="From 1 KiB in steps of ×4. Sizes whose buffers need more than a quarter of the "
        "free memory are skipped.",
    )
    operations = columns[3].multiselect(
        "Operations",
        OPERATIONS,
        default=OPERATIONS,
        key="collectives_operations",
        help="About one second per operation and size.",
    )
    return CollectivePlan(
        backend=backend,
        ranks=int(ranks),
        operations=tuple(operations),
        sizes=sizes_between(KIB, largest),
    )


def _start_button(server: Services, plan: CollectivePlan, refused: str | None) -> None:
    if server.collectives.running() is not None:
        if st.button("Stop", icon=":material/stop:", help="Stop. Results so far are kept."):
            server.collectives.close()
            st.rerun()
        return
    refused = refused or server.busy_reason(ServerActivity.COLLECTIVES)
    text = "Run these ranks with torchrun on this machine."
    if start_button("Measure", refused, text, icon=":material/speed:"):
        try:
            server.start_collectives(plan)
        except (RunError, OSError) as error:
            st.error(f"The measurement could not start. {error}")
        else:
            st.session_state.pop("collectives_shown", None)
            st.rerun()


def results(server: Services) -> None:
    """Draw what is measured now, or a measurement that was kept."""
    running = server.collectives.running() is not None
    every = LOOK_S if running else AGAIN_S
    st.fragment(functools.partial(_results, server, running), run_every=every)()


def _results(server: Services, was_running: bool) -> None:
    if was_running != (server.collectives.running() is not None):
        st.rerun()  # so that it is read as often as there is something new
    last = server.collectives.last()
    output = last.output() if last is not None else None
    if last is not None and output is not None and output.state is ChildState.RUNNING:
        done = len(output.answer["rows"])
        st.progress(
            min(1.0, done / last.plan.count),
            text=f"{done} of {last.plan.count} results after {output.seconds:.0f} s. The first "
            "seconds go to starting processes.",
        )
        _show(output.answer, None)
        return
    if output is not None and output.reason is not None:
        st.error(f"The last measurement failed. {escape_markdown(output.reason)}")
    _kept(server)


def _kept(server: Services) -> None:
    """Draw a measurement that was kept, and another one beside it."""
    names = result_names(server.runs)
    if not names:
        st.info("Nothing has been measured yet. Press **Measure**.", icon=":material/info:")
        return
    columns = st.columns(2)
    shown = columns[0].selectbox(
        "Measurement",
        names,
        format_func=result_label,
        key="collectives_shown",
        help="Files in `collectives` in the runs folder, newest first.",
    )
    other = columns[1].selectbox(
        "Compare with",
        [name for name in names if name != shown],
        index=None,
        format_func=result_label,
        placeholder="nothing",
        key="collectives_other",
        help="Shown as dotted lines.",
    )
    try:
        document = read_result(server.runs, shown)
        compared = read_result(server.runs, other) if other is not None else None
    except ResultError as error:
        st.warning(escape_markdown(str(error)), icon=":material/error:")
        return
    if not document["rows"]:
        st.info("This measurement has no results. Choose another, or press **Measure**.")
        return
    _show(document, compared)


def _show(document: dict[str, Any], other: dict[str, Any] | None) -> None:
    if any("reason" not in row for row in document["rows"]):
        _chart(document, other)
    if not document["rows"]:
        return
    for line in closing(document):
        st.caption(escape_markdown(line))
    table(table_rows(document), COLUMNS, "collectives_rows", "Results", height="content")


def _chart(document: dict[str, Any], other: dict[str, Any] | None) -> None:
    what = st.radio(
        "Chart",
        list(SHOWN),
        horizontal=True,
        key="collectives_chart",
        help="Both axes are logarithmic. The dashed line is the link's peak.",
    )
    drawn = figure(what, document, other)
    if drawn is not None:
        plot(drawn, "collectives_figure")
