"""The memory snapshots of the Memory tab: choice and content."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from dashboard.controls.actions import refusal
from dashboard.format import note, pick
from dashboard.run_files import SnapshotFile, file_content, snapshots
from dashboard.views.parts import download, number, table, text, warning
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.open_snapshot import SnapshotError, open_snapshot
from stepscope.memory.snapshots.summary import MAX_STACKS, SnapshotSummary, difference, short, where
from stepscope.run import RunInfo
from stepscope.store.recorder import CommandName

CHOSEN = "snapshot_chosen"
OTHER = "snapshot_other"
MAX_OPENED = 6  # Snapshots whose summaries are kept.
MIB = 2.0**20
MAX_FRAMES = 30  # Of a stack in a table cell.
_OPENING = threading.Lock()  # One process at a time: it may take gigabytes.
VIZ = (
    "For the history of the allocator and its fragmentation, download the file and drop it on "
    "[pytorch.org/memory_viz](https://pytorch.org/memory_viz); it stays in your browser."
)
SIZE = "%.3f MiB"
COLUMNS = {
    "Size": number(format=SIZE, help="As the allocator gives it, rounded up."),
    "Change": number(format="%+.3f MiB", help="Later minus earlier."),
    "Before": number(format=SIZE),
    "After": number(format=SIZE),
    "Blocks": number(format="localized"),
    "GPU": number(format="%d", help="torch's index of the device."),
    "Allocated at": text(
        width="large",
        help="The innermost line outside installed packages, and the line that allocated.",
    ),
    "Stack": st.column_config.ListColumn(
        width="large", help="Innermost frame first. A double click shows all of it."
    ),
}


@st.fragment
def snapshot_section(run: RunInfo) -> None:
    """Draw the chosen snapshot, or how to record one."""
    with st.container(border=True, key="snapshots_section"):
        with st.container(horizontal=True, vertical_alignment="bottom", key="snapshots_head"):
            st.markdown("#### Memory snapshots", width="content")
            chosen = _choice(snapshots(run.folder), run.id)
        if chosen:
            _draw(chosen)
        else:
            _empty(run)


def _choice(files: list[SnapshotFile], run_id: str) -> list[SnapshotFile]:
    """Draw the choice of a snapshot and of one to compare with; return them."""
    if not files:
        return []
    state = st.session_state
    if state.get(CHOSEN) not in files:
        state[CHOSEN] = files[0]
    file = st.selectbox("Snapshot", files, format_func=_label, key=CHOSEN, width=340)
    rest = [one for one in files if one != file]
    other = None
    if rest:
        if state.get(OTHER) not in rest:
            state[OTHER] = None
        other = pick(
            "Compare with",
            {one: _label(one) for one in rest},
            OTHER,
            "Shows allocations that are live in only one of the two.",
            index=None,
            placeholder="None",
            width=340,
        )
    download(
        "Download",
        functools.partial(file_content, file.path),
        f"{run_id}-{file.name}",
        f"snapshot_file_{file.path}",
        "For pytorch.org/memory_viz. A pickle file: load it in Python only if you trust its "
        "author. Opening it here is safe.",
        file=(file.path, file.size),
    )
    return [file] if other is None else [file, other]


def _label(file: SnapshotFile) -> str:
    return f"{printable(file.name)} ({format_bytes(file.size)})"


def _empty(run: RunInfo) -> None:
    how = "A live run on CUDA can record one with **Memory snapshot**."
    if refusal(CommandName.MEMORY_SNAPSHOT, run) is None:
        how = "**Memory snapshot** above records the allocations of the next steps."
    other = "`stepscope snapshot FILE` opens a file of `torch.cuda.memory._dump_snapshot`."
    note("memory", f"No snapshots. {how} {other}")


def _draw(files: list[SnapshotFile]) -> None:
    """Draw one snapshot, or the difference of two before the first."""
    summaries = []
    for file in files:
        try:
            modified = file.path.stat(follow_symlinks=False).st_mtime_ns
            summaries.append(_summary(file.path, file.size, modified))
        except SnapshotError as error:
            warning(f"The snapshot cannot be opened. {error}")
            return
        except OSError as error:
            warning(f"{file.name} cannot be read: {error.strerror or error}.")
            return
    if len(summaries) == 2:
        _difference(summaries[0], summaries[1])
    _live_stacks(summaries[0])
    st.markdown(VIZ)


@st.cache_data(max_entries=MAX_OPENED, show_spinner="Opening the snapshot…")
def _summary(path: Path, size: int, modified: int) -> SnapshotSummary:
    """Return the summary of a file of this state. Raises SnapshotError and OSError."""
    with _OPENING:
        return open_snapshot(path)


def _live_stacks(summary: SnapshotSummary) -> None:
    """Draw the live memory and a table of the stacks that allocated it."""
    st.markdown(
        f"**Live allocations:** {format_bytes(summary.allocated)} in {summary.blocks:,} blocks, "
        f"of {format_bytes(summary.reserved)} reserved"
    )
    if not summary.stacks:
        st.caption("Nothing is allocated.")
        return
    rows = [
        {
            "Size": stack.size / MIB,
            "Blocks": stack.blocks,
            "Allocated at": where(stack.frames),
            "GPU": stack.device,
            "Stack": _short_stack(stack.frames),
        }
        for stack in summary.stacks
    ]
    table(rows, COLUMNS, "snapshot_allocations", "Live allocations by stack, the largest first")
    if not any(stack.frames for stack in summary.stacks):
        st.caption(
            "No stacks were recorded: call `torch.cuda.memory._record_memory_history` before the "
            "allocations."
        )
    left = summary.stack_count - len(summary.stacks)
    if left:
        st.caption(f"Not shown: {left:,} more stacks with {format_bytes(summary.left_size)}.")


def _difference(after: SnapshotSummary, before: SnapshotSummary) -> None:
    """Draw the change of live memory since an earlier snapshot."""
    changes = difference(before, after)
    size = changes.after - changes.before
    st.markdown(
        f"**Difference:** {format_bytes(changes.after)} live, {format_bytes(abs(size))} "
        f"{'more' if size >= 0 else 'less'} than the {format_bytes(changes.before)} of the "
        "earlier snapshot"
    )
    if not changes.complete:
        st.caption(f"Only the {MAX_STACKS:,} largest stacks of each snapshot are compared.")
    if not changes.changes:
        st.caption("The same stacks hold the same memory in both.")
        return
    rows = [
        {
            "Change": change.size / MIB,
            "Before": change.before / MIB,
            "After": change.after / MIB,
            "Blocks": change.blocks,
            "Allocated at": where(change.frames),
            "Stack": _short_stack(change.frames),
        }
        for change in changes.changes
    ]
    table(rows, COLUMNS, "snapshot_changes", "Changes by stack, the largest first")


def _short_stack(frames: Sequence[str]) -> list[str]:
    return [short(frame) for frame in frames[:MAX_FRAMES]]
