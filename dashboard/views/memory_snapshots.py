"""Memory snapshots on the page: which lines of a program hold the memory, when, and where."""

from __future__ import annotations

import functools

import streamlit as st

from dashboard import services
from dashboard.controls.actions import supported_commands
from dashboard.format import escape_markdown
from dashboard.run_files import snapshot_content
from dashboard.snapshot_files import SnapshotFile
from dashboard.views.parts import download
from dashboard.views.snapshot_parts import difference_parts, summary_parts
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.load import MAX_FILE_BYTES
from stepscope.memory.snapshots.open_snapshot import SnapshotLoadTask
from stepscope.memory.snapshots.summary import SnapshotSummary
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo, read_only_reason

CHOSEN, OTHER, UPLOADED = "snapshot_chosen", "snapshot_other", "snapshot_uploaded"
UPLOADS, ERROR = "snapshot_uploads", "snapshot_upload_error"
WAITS = "snapshot_waits"
LOOK_S = 1.0  # Between two looks at a snapshot that is being opened.
VIZ = (
    "To inspect single allocations, download the file and drop it on "
    "[pytorch.org/memory_viz](https://pytorch.org/memory_viz); it stays in your browser."
)


def snapshot_section(run: RunInfo | None) -> None:
    """Draw the snapshot that is chosen, at first the run's newest; without one say how to get it.

    While one is being opened, the section alone is drawn again each second.
    """
    waits = st.session_state.get(WAITS, False)
    st.fragment(_section, run_every=LOOK_S if waits else None)(run)


def _section(run: RunInfo | None) -> None:
    snapshots = services.get().snapshots
    own = [] if run is None else snapshots.of_run(run.folder)
    files = [*own, *snapshots.others()]
    with st.container(border=True, key="snapshots_section"):
        with st.container(horizontal=True, vertical_alignment="bottom", key="snapshots_head"):
            st.markdown("#### Memory snapshots", width="content")
            file, other = _choice(files)
            if file is not None:
                _download(file)
            _upload()
        if file is None:
            _wait(False)
            _empty(run)
            return
        _opened(file, other)


def _choice(files: list[SnapshotFile]) -> tuple[SnapshotFile | None, SnapshotFile | None]:
    """Draw what to show and what to compare it with; return both."""
    if not files:
        return None, None
    uploaded = st.session_state.pop(UPLOADED, None)
    for file in files:
        if uploaded is not None and file.run is None and file.name == uploaded:
            st.session_state[CHOSEN] = file
    if st.session_state.get(CHOSEN) not in files:
        st.session_state[CHOSEN] = files[0]
    file = st.selectbox("Snapshot", files, format_func=_label, key=CHOSEN, width=340)
    rest = [one for one in files if one != file]
    if not rest:
        return file, None
    if st.session_state.get(OTHER) not in rest:
        st.session_state[OTHER] = None
    other = st.selectbox(
        "Compare with",
        rest,
        index=None,
        format_func=_label,
        key=OTHER,
        placeholder="None",
        width=340,
        help="Shows allocations that are live in only one of the two.",
    )
    return file, other


def _label(file: SnapshotFile) -> str:
    origin = "" if file.run is not None else " · uploaded"
    return f"{printable(file.name)} ({format_bytes(file.size)}){origin}"


def _download(file: SnapshotFile) -> None:
    download(
        "Download",
        functools.partial(snapshot_content, file.path),
        file.name if file.run is None else f"{file.run}-{file.name}",
        f"snapshot_file_{file.path}",
        "For pytorch.org/memory_viz. A pickle file: load it in Python only if you trust its "
        "author. Opening it here is safe.",
        file=(file.path, file.size),
    )


def _upload() -> None:
    """Draw a field that takes a file; a new field after each file frees what Streamlit holds."""
    state = st.session_state
    key = f"snapshot_upload_{state.setdefault(UPLOADS, 0)}"
    with st.popover("Open a file…", icon=":material/folder_open:", key="snapshot_upload"):
        st.file_uploader(
            "Snapshot file",
            ["pickle", "pkl"],
            key=key,
            max_upload_size=MAX_FILE_BYTES // 2**20,
            on_change=_keep,
            args=(key,),
        )
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
    can = (
        run is not None
        and run.status.live
        and read_only_reason(run) is None
        and CommandName.MEMORY_SNAPSHOT in supported_commands(run)
    )
    how = "**Memory snapshot** above records the allocations of the next steps."
    if not can:
        how = "A live run on CUDA can record one with **Memory snapshot**."
    folder = escape_markdown(str(services.get().snapshots.folder))
    st.caption(
        f":material/memory: No snapshots. {how} You can also open any "
        f"`torch.cuda.memory._dump_snapshot` file, here or from {folder}."
    )


def _opened(file: SnapshotFile, other: SnapshotFile | None) -> None:
    """Draw both once they are open; until then how far they are."""
    summaries = []
    for one in (file, other):
        if one is not None:
            summary = _summary(one)
            if summary is None:
                return
            summaries.append(summary)
    _wait(False)
    if len(summaries) == 2:
        difference_parts(summaries[0], summaries[1])
    summary_parts(summaries[0])
    st.caption(VIZ)


def _summary(file: SnapshotFile) -> SnapshotSummary | None:
    """Return the summary of a file; None after drawing why there is none yet."""
    snapshots = services.get().snapshots
    try:
        opening = snapshots.opening(file)
    except OSError as error:
        st.warning(f"{escape_markdown(file.name)} cannot be read: {error.strerror or error}.")
        _wait(False)
        return None
    if opening is not None and opening.summary is not None:
        return opening.summary
    if opening is not None and opening.error is not None:
        st.warning(f"The snapshot cannot be opened. {escape_markdown(printable(opening.error))}")
        st.button("Try again", key="snapshot_again", on_click=snapshots.forget, args=(file,))
        _wait(False)
        return None
    _draw_progress(file, opening)
    _wait(True)
    return None


def _draw_progress(file: SnapshotFile, opening: SnapshotLoadTask | None) -> None:
    """Draw how much has been read, in a process of its own."""
    if opening is None:
        st.caption(":material/hourglass: Another snapshot is being opened; this one is next.")
        return
    st.progress(
        min(0.99, opening.share),
        text=f"Opening {escape_markdown(printable(file.name))}: read "
        f"{format_bytes(opening.share * file.size)} of {format_bytes(file.size)}",
    )


def _wait(waits: bool) -> None:
    """Begin or end to look each second: only the whole page can change a fragment's timer."""
    if st.session_state.get(WAITS, False) is not waits:
        st.session_state[WAITS] = waits
        st.rerun()
