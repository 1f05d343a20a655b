"""The memory snapshots of the Memory tab: choice, upload, progress and content."""

from __future__ import annotations

import functools
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.controls.actions import refusal
from dashboard.format import escape_markdown, note, pick
from dashboard.run_files import SnapshotFile, file_content, snapshots
from dashboard.views.parts import download, warning
from dashboard.views.snapshot_parts import difference_parts, summary_parts
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.load import SIZE_LIMIT
from stepscope.memory.snapshots.summary import SnapshotSummary
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


def snapshot_section(run: RunInfo | None) -> None:
    """Draw the chosen snapshot, at first the run's newest, or how to record one.

    Only this section is drawn again each second while a snapshot is being opened.
    """
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
        more: Any = {"max_upload_size": SIZE_LIMIT // 2**20, "on_change": _keep, "args": (key,)}
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
    st.progress(
        min(0.99, opening.share),
        text=f"Opening {escape_markdown(printable(file.name))}: read "
        f"{format_bytes(opening.share * file.size)} of {format_bytes(file.size)}",
    )
    return False
