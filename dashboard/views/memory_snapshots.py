"""The memory snapshots of the Memory tab: choice, upload and content."""

from __future__ import annotations

import functools
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.charts import snapshot as charts
from dashboard.controls.actions import refusal
from dashboard.format import escape_markdown, note, pick, segments
from dashboard.run_files import SnapshotFile, file_content, snapshots
from dashboard.views.parts import download, number, plot, table, text, warning
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.load import MAX_FILE_BYTES
from stepscope.memory.snapshots.segments import DeviceSegments
from stepscope.memory.snapshots.summary import SnapshotSummary, difference
from stepscope.memory.snapshots.timeline import MemoryTimeline, lasting
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo

CHOSEN, OTHER, UPLOADED = "snapshot_chosen", "snapshot_other", "snapshot_uploaded"
UPLOADS, ERROR = "snapshot_uploads", "snapshot_upload_error"
WAITS = "snapshot_waits"
LOOK_S = 1.0  # Refresh while a snapshot is being opened.
VIZ = (
    "To inspect single allocations, download the file and drop it on "
    "[pytorch.org/memory_viz](https://pytorch.org/memory_viz); it stays in your browser."
)
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
}


def snapshot_section(run: RunInfo | None) -> None:
    """Draw the chosen snapshot or how to record one; each second while one is being opened."""
    waits = st.session_state.get(WAITS, False)
    st.fragment(_section, run_every=LOOK_S if waits else None)(run)


def _section(run: RunInfo | None) -> None:
    own = [] if run is None else snapshots(run.folder)
    files = [*own, *services.get().snapshots.others()]
    with st.container(border=True, key="snapshots_section"):
        with st.container(horizontal=True, vertical_alignment="bottom", key="snapshots_head"):
            st.markdown("#### Memory snapshots", width="content")
            chosen = _choice(files)
            _upload()
        if not chosen:
            _empty(run)
        waits = not _opened(chosen)
    # Only a run of the whole page can change a fragment's timer.
    if st.session_state.get(WAITS, False) is not waits:
        st.session_state[WAITS] = waits
        st.rerun()


def _choice(files: list[SnapshotFile]) -> list[SnapshotFile]:
    """Draw the choice of a snapshot and of one to compare with; return them."""
    if not files:
        return []
    state = st.session_state
    uploaded = state.pop(UPLOADED, None)
    state[CHOSEN] = next(
        (file for file in files if file.run is None and file.name == uploaded),
        state.get(CHOSEN) if state.get(CHOSEN) in files else files[0],
    )
    file = st.selectbox("Snapshot", files, format_func=_label, key=CHOSEN, width=340)
    rest = [one for one in files if one != file]
    other = None
    if rest:
        if state.get(OTHER) not in rest:
            state[OTHER] = None
        about = "Shows allocations that are live in only one of the two."
        more: Any = {"index": None, "placeholder": "None", "width": 340}
        other = pick("Compare with", {one: _label(one) for one in rest}, OTHER, about, **more)
    download(
        "Download",
        functools.partial(file_content, file.path),
        file.name if file.run is None else f"{file.run}-{file.name}",
        f"snapshot_file_{file.path}",
        "For pytorch.org/memory_viz. A pickle file: load it in Python only if you trust its "
        "author. Opening it here is safe.",
        file=(file.path, file.size),
    )
    return [file] if other is None else [file, other]


def _label(file: SnapshotFile) -> str:
    origin = "" if file.run is not None else " · uploaded"
    return f"{printable(file.name)} ({format_bytes(file.size)}){origin}"


def _upload() -> None:
    """Draw an upload field; a new field after each file frees Streamlit's copy."""
    state = st.session_state
    key = f"snapshot_upload_{state.setdefault(UPLOADS, 0)}"
    with st.popover("Open a file…", icon=":material/folder_open:", key="snapshot_upload"):
        more: Any = {"max_upload_size": MAX_FILE_BYTES // 2**20, "on_change": _keep, "args": (key,)}
        st.file_uploader("Snapshot file", ["pickle", "pkl"], key=key, **more)
    if error := state.pop(ERROR, None):
        st.caption(f":red[{escape_markdown(error)}]")


def _keep(key: str) -> None:
    state = st.session_state
    file = state[key]
    if file is None:
        return
    state[UPLOADS] += 1
    try:
        state[UPLOADED] = services.get().snapshots.keep(file.name, file.getbuffer())
    except (ValueError, OSError) as error:
        state[ERROR] = f"The file was not kept. {error}"


def _empty(run: RunInfo | None) -> None:
    how = "A live run on CUDA can record one with **Memory snapshot**."
    if run is not None and refusal(CommandName.MEMORY_SNAPSHOT, run) is None:
        how = "**Memory snapshot** above records the allocations of the next steps."
    folder = escape_markdown(str(services.get().snapshots.folder))
    note(
        "memory",
        f"No snapshots. {how} You can also open any `torch.cuda.memory._dump_snapshot` file, here "
        f"or from {folder}.",
    )


def _opened(files: list[SnapshotFile]) -> bool:
    """Draw one snapshot or two once they are open; return False while one is being opened."""
    summaries = []
    for file in files:
        summary = _summary(file)
        if not isinstance(summary, SnapshotSummary):
            return summary
        summaries.append(summary)
    if len(summaries) == 2:
        difference_parts(summaries[0], summaries[1])
    if summaries:
        summary_parts(summaries[0])
        st.caption(VIZ)
    return True


def _summary(file: SnapshotFile) -> SnapshotSummary | bool:
    """Return the summary of a file; True after an error, False while it is being opened."""
    library = services.get().snapshots
    try:
        opening = library.opening(file)
    except OSError as error:
        warning(f"{file.name} cannot be read: {error.strerror or error}.")
        return True
    if opening is None:
        note("hourglass", "Another snapshot is being opened; this one is next.")
        return False
    if opening.summary is not None:
        return opening.summary
    if opening.error is not None:
        warning(f"The snapshot cannot be opened. {opening.error}")
        st.button("Try again", key="snapshot_again", on_click=library.forget, args=(file,))
        return True
    note("hourglass", f"Opening {escape_markdown(printable(file.name))}…")
    return False


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
        st.markdown(f"Memory: {memory.parts.text}.")
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


def _history(summary: SnapshotSummary, history: MemoryTimeline) -> None:
    lasted = f" in {lasting(history.seconds[-1])}" if history.seconds else ""
    st.markdown(
        f"**Allocations over time:** {history.actions:,} actions{lasted}, peak "
        f"{format_bytes(history.peak)}, {format_bytes(history.end)} at the end"
    )
    plot(charts.history_figure(summary, history), "snapshot_history")
    st.caption(
        "Each band is what one stack allocated, named by its innermost line outside installed "
        "packages; the largest at the peak get their own band. Sizes as requested."
    )


def _allocations(summary: SnapshotSummary, device: int, history: MemoryTimeline | None) -> None:
    held = [site for site in summary.sites if site.device == device]
    kinds = {"At the end": charts.stack_rows(summary, held)}
    if history is not None and history.at_peak:
        kinds["At the peak"] = charts.stack_rows(summary, history.at_peak)
    kinds["By module"] = charts.module_rows(summary, device)
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
    plot(charts.map_figure(summary, memory), "snapshot_map")
    shown = memory.rows[: charts.MAP_ROWS]
    more = memory.segments - len(shown)
    if more:
        left = memory.parts.reserved - sum(row.size for row in shown)
        st.caption(f"{more:,} further segments of {format_bytes(left)} are split less.")


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
        table(charts.change_rows(changes), COLUMNS, "snapshot_changes", alt)
    else:
        st.caption("The same stacks hold the same memory in both.")
    if not changes.complete:
        st.caption("Incomplete: one of the snapshots has more stacks than are kept.")
