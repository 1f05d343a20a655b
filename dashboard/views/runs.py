"""The Runs page: all runs, searched, sorted and edited; a click on a cell opens a run."""

import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.format import button, escape_markdown
from dashboard.run_rows import MIB, RunRow, disk_use, search
from dashboard.views import parts
from dashboard.views.live_panel import examples, open_run
from dashboard.views.parts import connections, number, text
from stepscope.run import RunError, RunInfo, is_own, read_metadata, read_run
from stepscope.run.info import MAX_LABEL, MAX_NOTE, edit_notes
from stepscope.run.retention import delete_run

COLUMNS = {
    "Name": text(pinned=True, width=160, help="The script, or the built-in workload."),
    "Status": text(
        help="Stopped by the user, failed with an error, crashed without a message, or nan: "
        "finished with a loss that is not finite."
    ),
    "Kind": text(help="Built-in training, watched script, script with stepscope.init, recording."),
    "Source": text(help="Host and folder; empty for the folder of new runs."),
    "Tags": text(help="Of stepscope.init, stepscope watch --tag, or added here."),
    "Group": text(help="Of stepscope.init, stepscope watch --group, or added here."),
    "Pinned": st.column_config.CheckboxColumn(help="First in the list; never deleted."),
    "Ranks": number(help="Number of processes of the job."),
    "Device": text(help="Training device."),
    "Precision": text(help="Built-in runs only."),
    "Steps": number(format="localized", help="Optimizer steps recorded."),
    "Best loss": number(
        format="%.4g", help="Lowest validation loss; training loss where nothing is validated."
    ),
    "Samples/s": number(
        format="%,.0f",
        help="Samples per step divided by mean step time. Distributed runs: rank 0's rate times "
        "the number of ranks.",
    ),
    "Peak allocated": number(
        format="%.2f GiB", help="Peak of torch's CUDA allocator; empty for CPU runs."
    ),
    "Peak process": number(format="%.2f GiB", help="Peak resident memory of the training process."),
    "Energy": number(format="%.1f Wh", help="Of the GPUs, by all processes during the run."),
    "Size": number(
        format="%.1f MiB",
        help="All files of the run folder; a live run has a buffer of 17 MiB. Empty for remote "
        "runs.",
    ),
    "Started": st.column_config.DatetimeColumn(format="D MMM HH:mm", help="Local time."),
    "Duration": number(format="compact", help="Hours:minutes:seconds from start to end."),
    "Commit": text(help="git commit of the script; * with uncommitted changes."),
    "Note": text(help="Note of the run."),
}

OPTIONAL = ("Kind", "Source", "Pinned", "Energy", "Commit", "Note")
MAX_OPTIONS = 500  # Metrics and settings that can be chosen as columns.
SELECTION = "runs_selection"  # Session state: rises when no run is to be ticked any more.
KEPT = "runs_kept"  # Session state: why runs were not deleted, drawn until the page is left.

server = services.get()
label_of = {str(folder): label for folder, label in server.roots.items()}
if st.session_state.arrived:
    st.session_state.pop(KEPT, None)


@st.fragment(run_every="5s")
def table() -> None:
    """Draw the search, a row for each run, and the buttons of the ticked runs."""
    with st.spinner("Reading the runs…", show_time=True):
        rows = server.run_list.rows()
    unreadable = server.run_list.unreadable()
    parts.warn_of_unreadable(unreadable)
    if not rows:
        if not unreadable:
            folder = server.runs.absolute()
            st.markdown(f"#### No runs yet\nRuns recorded in `{folder}` appear here.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        query = st.text_input(
            "Search",
            key="search",
            type="search",
            bind="query-params",
            placeholder="Words, lr>0.01, val/loss<0.3, status=failed",
            help="Words in the name, status, tags, group, note or settings; and conditions on any "
            "column: lr>=0.01, train/loss<0.3, best_loss<0.1, duration>60 (seconds), "
            "started>=2026-11-01, status=failed, group=sweep.",
        )
        columns = _columns(rows)
    found, problem = search(rows, query or "")
    key = f"runs_table_{st.session_state.get(SELECTION, 0)}_{query}"
    # Ticks are row numbers: while there are any, the rows stay those that were drawn.
    if any(st.session_state.get(key, {}).get("selection", {}).values()):
        by_id = {row.id: row for row in found}
        drawn = st.session_state.get("runs_order", ())
        if drawn and by_id.keys() >= set(drawn):
            found = [by_id[name] for name in drawn]
        else:
            key = f"runs_table_{untick()}_{query}"
    st.session_state["runs_order"] = [row.id for row in found]
    select = {"on_select": "rerun", "selection_mode": ["multi-row", "single-cell"]}
    alt = "The runs, live ones first, then pinned ones, then the newest"
    frame = _frame(found, columns)
    chosen = parts.table(frame, COLUMNS, key, alt, height="auto", **select)["selection"]
    for index, _ in chosen["cells"][:1]:
        open_run(found[index].id)
    ticked = [found[index] for index in chosen["rows"]]
    for reason in st.session_state.get(KEPT, ()):
        parts.warning(reason)
    with st.container(horizontal=True, vertical_alignment="center"):
        if ticked:
            _buttons(ticked)
        help_text = "Click a cell to open the run, a column title to sort. Tick runs to edit them."
        if len(found) < len(rows):
            why = f" {escape_markdown(problem)}" if problem and not found else ""
            help_text = f"{len(found):,} of {len(rows):,} runs.{why} {help_text}"
        if server.sources:
            help_text += " The values of a remote run are loaded when it is opened."
        st.caption(help_text)
        here = [row.cells.get("Size") for row in rows if row.root == str(server.runs)]
        sizes = [int(MIB * size) for size in here if isinstance(size, float)]
        if sizes:
            where = f"{escape_markdown(str(server.runs))}: " if len(server.roots) > 1 else ""
            st.caption(where + disk_use(server.runs, sizes))


def _columns(rows: Sequence[RunRow]) -> list[str]:
    own = dict.fromkeys(column for row in rows for column in row.cells if column not in COLUMNS)
    fixed = [name for name in COLUMNS if name != "Source" or len(server.roots) > 1]
    with st.popover("Columns", icon=":material/view_column:"):
        chosen: list[str] = st.multiselect(
            "Columns",
            [
                *fixed,
                *sorted(own, key=lambda name: (name.startswith("config: "), name))[:MAX_OPTIONS],
            ],
            [name for name in fixed if name not in OPTIONAL or name == "Source"],
            key="columns",
            bind="query-params",
            help="Any setting, and the last and best value of any metric of the steps.",
        )
    return chosen if "Name" in chosen else ["Name", *chosen]


def _frame(rows: Sequence[RunRow], columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the cells by column; a column with texts has texts only."""
    values: dict[str, list[Any]] = {name: [row.cells.get(name) for row in rows] for name in columns}
    for name, cells in values.items():
        if any(isinstance(cell, str) for cell in cells):
            values[name] = [None if cell is None else str(cell) for cell in cells]
    own: dict[str, list[Any]] = {
        "Source": [label_of[row.root] for row in rows],
        "Started": [datetime.fromtimestamp(row.created) for row in rows],
        "Duration": [
            None if row.duration is None else timedelta(seconds=row.duration) for row in rows
        ],
    }
    return {name: own.get(name, cells) for name, cells in values.items()}


def _buttons(ticked: Sequence[RunRow]) -> None:
    about = "Compare the ticked runs."
    if len(ticked) > 1 and button("Compare", "compare_arrows", "runs_compare", about):
        runs = ",".join(row.id for row in ticked)
        st.switch_page("views/compare.py", query_params={"runs": runs})
    edit_ticked(ticked)


def edit_ticked(ticked: Sequence[RunRow]) -> None:
    """Draw the form and the question about the ticked runs, which must be of this user."""
    try:
        runs = [read_run(server.folder(row.id)) for row in ticked]
        refused = None
    except RunError as error:
        runs = []
        refused = str(error)
    foreign = next((run for run in runs if not is_own(run)), None)
    if foreign is not None:
        refused = f"{foreign.id} belongs to another user or host."
    for label, icon, draw in (("Edit", "edit", _edit), ("Delete", "delete", _delete)):
        icon = f":material/{icon}:"
        with st.popover(label, icon=icon, disabled=refused is not None, help=refused):
            if refused is None:
                draw(runs)


def _edit(runs: Sequence[RunInfo]) -> None:
    known = [read_metadata(run) for run in runs]
    tags = sorted({tag for metadata in known for tag in metadata.tags})
    groups = {metadata.group for metadata in known}
    pins = [metadata.pinned for metadata in known]
    # What stays as shown is not written: several runs keep their groups and tags.
    shown = {"group": (groups.pop() or "") if len(groups) == 1 else "", "pinned": all(pins)}
    key = _key_of(runs)
    given: dict[str, object] = {}
    with st.form(f"edit_{key}", border=False):
        if len(runs) == 1:
            shown |= {"name": known[0].name, "note": known[0].note or ""}
            given["name"] = st.text_input("Name", known[0].name, MAX_LABEL, key=f"name_{key}")
            given["note"] = st.text_area(
                "Note", known[0].note or "", max_chars=MAX_NOTE, key=f"note_{key}"
            )
        kept = st.multiselect(
            "Tags",
            tags,
            tags,
            key=f"tags_{key}",
            accept_new_options=True,
            placeholder="Type to add a tag",
        )
        group = str(shown["group"])
        given["group"] = st.text_input("Group", group, MAX_LABEL, key=f"group_{key}")
        about = "First in the list. Neither this page nor `stepscope gc` deletes a pinned run."
        given["pinned"] = st.checkbox("Pin", all(pins), key=f"pin_{key}", help=about)
        if not st.form_submit_button("Save", type="primary"):
            return
    edits = {name: value for name, value in given.items() if value != shown[name]}
    try:
        for run, metadata in zip(runs, known, strict=True):
            own = [tag for tag in kept if tag in metadata.tags or tag not in tags]
            changed = {} if tuple(own) == metadata.tags else {"tags": own}
            edit_notes(run.folder, **changed, **edits)
    except (RunError, OSError) as error:
        parts.warning(f"Not saved: {error}")
    else:
        untick()
        st.rerun()


def _delete(runs: Sequence[RunInfo]) -> None:
    lines = [
        f"- {escape_markdown(read_metadata(run).name)} ({run.id})" for run in runs[: parts.NAMED]
    ]
    lines += [f"- {len(runs) - parts.NAMED} more"] if len(runs) > parts.NAMED else []
    count = f"these {len(runs)} runs" if len(runs) > 1 else "this run"
    st.markdown(f"Delete {count} with all files? This cannot be undone.\n" + "\n".join(lines))
    if not st.button(f"Delete {count}", type="primary", key=f"delete_{_key_of(runs)}"):
        return
    kept = []
    for run in runs:
        try:
            reason = delete_run(run.folder, run.folder.parent, keep_tagged=False)
        except OSError as error:
            reason = str(error)
        kept += [f"{run.id} was not deleted: {reason}."] if reason else []
    st.session_state[KEPT] = kept
    untick()
    st.rerun()


def _key_of(runs: Sequence[RunInfo]) -> str:
    """Return a part of widget keys: widgets of other runs must not keep their values."""
    return f"{zlib.crc32(repr([run.id for run in runs]).encode()):x}"


def untick() -> int:
    """Make the next table one without ticks; return its number."""
    number: int = st.session_state.get(SELECTION, 0) + 1
    st.session_state[SELECTION] = number
    return number


connections(server)
table()
examples(server)
