"""The Hardware page: every GPU of this machine, and the speed of its collectives."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import services
from dashboard.api.devices import devices_answer
from dashboard.charts.collectives import figure, table_rows
from dashboard.controls.sidebar import keep_settings
from dashboard.format import escape_markdown, pick
from dashboard.live_chart import device_cards
from dashboard.services import ServerActivity, Services
from dashboard.views import parts
from stepscope.common.formatting import format_bytes
from stepscope.host.child_process import ChildState
from stepscope.run import RunError
from trainer.collectives import measurement as stored

TABS = {"gpus": "GPUs", "collectives": "Collectives"}
TAB = "hardware_tab"
LOOK_S, AGAIN_S = 0.5, 5.0  # Refresh of the results during a measurement, and without one.
LARGEST = tuple(size * 2**20 for size in (1, 4, 16, 64, 256, 1024))
COLUMNS = {
    "Operation": parts.text(pinned=True),
    "Time": parts.number(format="%,.1f µs"),
    "Slowest / fastest": parts.number(format="%.1f"),
    "Algorithm": parts.number(format="%.3g GB/s"),
    "Bus": parts.number(format="%.3g GB/s"),
    "Reason": parts.text(width="large"),
}
NAMES = {stored.GLOO: "gloo (CPUs)", stored.NCCL: "nccl (GPUs)"}


def collectives_tab(server: Services) -> None:
    """Draw the settings of a measurement, its button, and the results."""
    st.markdown("### Collectives")
    st.container(width=parts.READING_WIDTH).markdown(
        "Speed of collective operations between processes on this machine, by operation and size. "
        "**Algorithm bandwidth** is size divided by time. **Bus bandwidth** is the traffic of one "
        "link, independent of the number of ranks: compare it with the link's specification. Small "
        "sizes show latency, large sizes show bandwidth."
    )
    found = server.devices()
    gpus = sum(1 for one in found.devices if one.cuda_index is not None)
    plan = _plan(gpus)
    _start_button(server, plan, stored.refusal(plan, gpus, found.cuda_reason))
    running = server.collectives.running() is not None
    st.fragment(_results, run_every=LOOK_S if running else AGAIN_S)(server, running)


def _plan(gpus: int) -> stored.CollectivePlan:
    columns = st.columns(3)
    about = "gloo transfers CPU tensors, NCCL GPU tensors (one GPU per rank)."
    backend = pick(
        "Backend", NAMES, "collectives_backend", about, columns[0], index=1 if gpus > 1 else 0
    )
    about = "Number of processes. With gloo, more processes than CPU cores slow each other down."
    first = min(stored.MAX_RANKS, max(2, gpus))
    ranks = columns[1].number_input(
        "Ranks", 2, stored.MAX_RANKS, first, key="collectives_ranks", help=about
    )
    about = (
        "From 1 KiB in steps of ×4, about one second per operation and size. Sizes whose buffers "
        "need more than a quarter of the free memory are skipped."
    )
    sizes = {size: format_bytes(size) for size in LARGEST}
    largest = pick("Largest size", sizes, "collectives_largest", about, columns[2], index=2)
    sizes_from_1k = stored.sizes_between(stored.KIB, largest)
    return stored.CollectivePlan(backend=backend, ranks=int(ranks), sizes=sizes_from_1k)


def _start_button(server: Services, plan: stored.CollectivePlan, refused: str | None) -> None:
    if server.collectives.running() is not None:
        if st.button("Stop", icon=":material/stop:", help="Stop. Results so far are kept."):
            server.collectives.close()
            st.rerun()
        return
    refused = refused or server.busy_reason(ServerActivity.COLLECTIVES)
    about = "Run these ranks with torchrun on this machine."
    if parts.start_button("Measure", refused, about, icon=":material/speed:"):
        try:
            server.begin(
                ServerActivity.COLLECTIVES,
                lambda: server.collectives.keep(stored.Measurement(plan, server.runs)),
            )
        except (RunError, OSError) as error:
            st.error(f"The measurement could not start. {error}")
        else:
            st.session_state.pop("collectives_shown", None)
            st.rerun()


def _results(server: Services, was_running: bool) -> None:
    if was_running != (server.collectives.running() is not None):
        st.rerun()  # for the other refresh interval
    last = server.collectives.last()
    output = last.output() if last is not None else None
    if last is not None and output is not None and output.state is ChildState.RUNNING:
        done, count = len(output.answer["rows"]), len(stored.OPERATIONS) * len(last.plan.sizes)
        st.progress(
            min(1.0, done / count),
            text=f"{done} of {count} results after {output.seconds:.0f} s. The first "
            "seconds go to starting processes.",
        )
        _show(output.answer, None)
        return
    if output is not None and output.reason is not None:
        st.error(f"The last measurement failed. {escape_markdown(output.reason)}")
    _stored(server)


def _stored(server: Services) -> None:
    names = stored.result_names(server.runs)
    if not names:
        st.info("Nothing has been measured yet. Press **Measure**.", icon=":material/info:")
        return
    left, right = st.columns(2)
    about = "Files in `collectives` in the runs folder, newest first."
    shown = pick("Measurement", {name: name for name in names}, "collectives_shown", about, left)
    others = {name: name for name in names if name != shown}
    more: Any = {"index": None, "placeholder": "nothing"}
    about = "Shown as dotted lines."
    other = pick("Compare with", others, "collectives_other", about, right, **more)
    try:
        document = stored.read_result(server.runs, shown)
        compared = stored.read_result(server.runs, other) if other is not None else None
    except stored.ResultError as error:
        parts.warning(str(error))
        return
    if not document["rows"]:
        st.info("This measurement has no results. Choose another, or press **Measure**.")
    _show(document, compared)


def _show(document: dict[str, Any], other: dict[str, Any] | None) -> None:
    rows = document["rows"]
    drawn = figure(document, other)
    if drawn is not None:
        parts.plot(drawn, "collectives_figure")
        st.caption("Both axes are logarithmic. The dashed line is the link's peak.")
    if rows:
        st.caption(escape_markdown(stored.closing(document)))
        parts.table(table_rows(document), COLUMNS, "collectives_rows", "Results", height="content")


server = services.get()
keep_settings()
asked = st.query_params.get("tab")
st.session_state.setdefault(TAB, TABS.get(asked or "", TABS["gpus"]))
gpus, collectives = st.tabs(list(TABS.values()), key=TAB, on_change="rerun")
tab = "collectives" if collectives.open else "gpus"
if asked != tab:
    st.query_params["tab"] = tab

if tab == "gpus":
    with gpus:
        with st.spinner("Reading the GPUs of this machine…", show_time=True):
            first = devices_answer(server, {})
        device_cards(first, key="devices")
        st.caption(
            "Updated once a second while the page is open; nothing is recorded. In a terminal: "
            "`stepscope devices --watch`.",
            help="`stepscope record` saves the same readings to a run folder, ten times per "
            "second.",
        )
else:
    with collectives:
        parts.devices(server)
        collectives_tab(server)
