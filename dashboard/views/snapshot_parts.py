"""The parts of a memory snapshot on the page: totals, history, allocations and segments."""

from __future__ import annotations

import streamlit as st

from dashboard.charts.snapshot import (
    MAP_ROWS,
    allocation_rows,
    change_rows,
    history_figure,
    map_figure,
    module_rows,
    peak_rows,
    place_rows,
)
from dashboard.format import escape_markdown
from dashboard.views.parts import number, plot, segments, table, text
from stepscope.common.formatting import format_bytes
from stepscope.memory.snapshots.segments import DeviceSegments
from stepscope.memory.snapshots.summary import SnapshotSummary, difference
from stepscope.memory.snapshots.timeline import MemoryTimeline, lasting

SIZE = "%.3f MiB"
COLUMNS = {
    "Size": number(format=SIZE, help="As the allocator gives it, rounded up."),
    "Change": number(format="%+.3f MiB", help="After minus before."),
    "Before": number(format=SIZE),
    "After": number(format=SIZE),
    "Blocks": number(format="localized"),
    "Allocated at": text(width="medium", help="The innermost frame outside installed packages."),
    "Module": text(
        width="medium",
        help="File of the innermost nn.Module forward, and the line that called it. Empty if "
        "the stack has none; frames carry no class names.",
    ),
    "Stack": st.column_config.ListColumn(
        width="large", help="Innermost frame first. A double click shows all of it."
    ),
    **{name: number(format=SIZE) for name in ("Reserved", "Allocated", "Cached", "Split")},
}


def summary_parts(summary: SnapshotSummary) -> None:
    """Draw totals, history, allocations and segments of one device."""
    devices = sorted(
        {one.device for one in summary.devices} | {one.device for one in summary.histories}
    )
    if not devices:
        st.caption("This snapshot has no segments and no history.")
        return
    device = devices[0]
    if len(devices) > 1:
        device = st.segmented_control(
            "GPU", devices, default=device, required=True, key="snapshot_device"
        )
    memory = next((one for one in summary.devices if one.device == device), None)
    history = next((one for one in summary.histories if one.device == device), None)
    if memory is not None:
        st.markdown(_totals(memory))
    failed = [one for one in summary.failed if one.device == device]
    if failed:
        free, size = failed[-1].device_free, format_bytes(failed[-1].requested)
        had = "" if free is None else f"; the device had {format_bytes(free)} free"
        times = "once" if len(failed) == 1 else f"{len(failed)} times"
        text = f"An allocation failed {times} in this history, the last time of {size}{had}."
        st.warning(text, icon=":material/memory_alt:")
    if history is None:
        st.caption("No history: taken without `_record_memory_history`.")
    else:
        _history(summary, history)
    _allocations(summary, device, history)
    if memory is not None:
        _map(summary, memory)


def _totals(memory: DeviceSegments) -> str:
    parts = memory.parts
    sums = [
        f"{format_bytes(size)} {name}"
        + (f" ({size / parts.reserved:.0%})" if parts.reserved and share else "")
        for size, name, share in (
            (parts.allocated, "allocated", True),
            (parts.awaiting_free, "that another stream still uses", False),
            (parts.cached, "cached and returnable", True),
            (parts.split, "split", True),
        )
        if size or share
    ]
    return (
        f"**{format_bytes(parts.reserved)} reserved** = {' + '.join(sums)}. Largest free block: "
        f"{format_bytes(parts.largest_free)}."
    )


def _history(summary: SnapshotSummary, history: MemoryTimeline) -> None:
    over_time = False
    with st.container(horizontal=True, vertical_alignment="center"):
        lasted = f" in {lasting(history.seconds[-1])}" if history.seconds else ""
        st.markdown(
            f"**Allocations over time:** {history.actions:,} actions{lasted}, peak "
            f"{format_bytes(history.peak)}, {format_bytes(history.end)} at the end",
            width="content",
        )
        if history.seconds is not None:
            over_time = segments("Axis", ["Actions", "Time"], "snapshot_axis") == "Time"
    plot(history_figure(summary, history, over_time=over_time), "snapshot_history")
    notes = [
        "Each band is what one stack allocated, named by its innermost line outside installed "
        "packages; the largest at the peak get their own band. Sizes as requested."
    ]
    if summary.unreadable:
        notes.append(f"{summary.unreadable:,} entries could not be read.")
    if summary.stacks_left:
        notes.append(f"The stacks of {summary.stacks_left:,} allocations were too many to keep.")
    st.caption(" ".join(notes))


def _allocations(summary: SnapshotSummary, device: int, history: MemoryTimeline | None) -> None:
    kinds = {"At the end": allocation_rows(summary, device)}
    if history is not None and history.at_peak:
        kinds["At the peak"] = peak_rows(summary, history)
    kinds["By module"] = module_rows(summary, device)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("**Top allocations**", width="content")
        kind = segments("Top allocations", list(kinds), "snapshot_table")
    rows = kinds.get(kind, kinds["At the end"])
    if not rows:
        listed = any(one.device == device for one in summary.devices)
        st.caption("Nothing is allocated." if listed else "It lists no segments.")
        return
    table(rows, COLUMNS, "snapshot_allocations", "Allocations, the largest first")
    if kind != "At the peak" and summary.sites_left:
        scope = " of all GPUs" if len(summary.devices) > 1 else ""
        st.caption(
            f"Not shown: {summary.sites_left:,} more stacks{scope}, holding "
            f"{format_bytes(summary.size_left)}."
        )


def _map(summary: SnapshotSummary, memory: DeviceSegments) -> None:
    st.markdown("**Segments:** memory taken from the driver, most fragmented first")
    plot(map_figure(summary, memory), "snapshot_map")
    shown = memory.rows[:MAP_ROWS]
    more = memory.segments - len(shown)
    if more:
        left = memory.parts.reserved - sum(row.size for row in shown)
        st.caption(f"{more:,} further segments of {format_bytes(left)} are split less.")
    if len(summary.places) > 1:
        with st.expander("By stream and pool", icon=":material/call_split:"):
            table(place_rows(summary), COLUMNS, "snapshot_places", "Memory by stream and pool")
    if summary.settings:
        with st.expander("Settings of the allocator", icon=":material/settings:"):
            # Cells are Markdown, and the file may be from an untrusted source.
            st.table({escape_markdown(k): escape_markdown(v) for k, v in summary.settings.items()})


def difference_parts(after: SnapshotSummary, before: SnapshotSummary) -> None:
    """Draw the change of live memory since an earlier snapshot."""
    changes = difference(before, after)
    more = changes.after - changes.before
    st.markdown(
        f"**Difference:** {format_bytes(changes.after)} live, {format_bytes(abs(more))} "
        f"{'more' if more >= 0 else 'less'} than the {format_bytes(changes.before)} of the "
        "earlier snapshot"
    )
    if changes.changes:
        alt = "Changes by stack, the largest first"
        table(change_rows(changes), COLUMNS, "snapshot_changes", alt)
    else:
        st.caption("The same stacks hold the same memory in both.")
    if not changes.complete:
        st.caption("Incomplete: one of the snapshots has more stacks than are kept.")
