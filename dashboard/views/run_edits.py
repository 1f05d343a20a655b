"""Edits of the ticked runs on the Runs page: name, tags, group, note, pin, and deletion."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard.format import escape_markdown
from dashboard.run_catalog import RunRow
from dashboard.services import Services
from dashboard.views.parts import warning
from stepscope.run import RunError, RunInfo, is_own, read_run
from stepscope.run.metadata import MAX_LABEL, MAX_NOTE, edit_notes, read_metadata
from stepscope.run.retention import PartlyDeletedError, delete_run

NAMED = 8  # Runs that the question names.
SELECTION = "runs_selection"  # Session state: rises when no run is to be ticked any more.
KEPT = "runs_kept"  # Session state: why runs were not deleted, drawn until the page is left.


def edit_ticked(server: Services, ticked: Sequence[RunRow]) -> None:
    """Draw the form and the question about the ticked runs, which must be of this user."""
    try:
        runs, refused = [read_run(server.folder(row.id)) for row in ticked], None
    except RunError as error:
        runs, refused = [], str(error)
    foreign = next((run for run in runs if not is_own(run)), None)
    if foreign is not None:
        refused = f"{foreign.id} belongs to another user or host."
    for label, icon, draw in (("Edit", "edit", _edit), ("Delete", "delete", _delete)):
        icon = f":material/{icon}:"
        with st.popover(label, icon=icon, disabled=refused is not None, help=refused):
            if refused is None:
                draw(server, runs)


def _edit(server: Services, runs: Sequence[RunInfo]) -> None:
    known = [read_metadata(run) for run in runs]
    tags = sorted({tag for metadata in known for tag in metadata.tags})
    groups, pins = {metadata.group for metadata in known}, [metadata.pinned for metadata in known]
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
        more: Any = {"accept_new_options": True, "placeholder": "Type to add a tag"}
        kept = st.multiselect("Tags", tags, tags, key=f"tags_{key}", **more)
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
            server.forget(run.id)
    except (RunError, OSError) as error:
        warning(f"Not saved: {error}")
    else:
        untick()
        st.rerun()


def _delete(server: Services, runs: Sequence[RunInfo]) -> None:
    lines = [f"- {escape_markdown(read_metadata(run).name)} ({run.id})" for run in runs[:NAMED]]
    lines += [f"- {len(runs) - NAMED} more"] if len(runs) > NAMED else []
    count = f"these {len(runs)} runs" if len(runs) > 1 else "this run"
    st.markdown(f"Delete {count} with all files? This cannot be undone.\n" + "\n".join(lines))
    if not st.button(f"Delete {count}", type="primary", key=f"delete_{_key_of(runs)}"):
        return
    kept = []
    for run in runs:
        reason = None
        try:
            reason = delete_run(run.folder, run.folder.parent, keep_tagged=False)
        except FileNotFoundError:
            continue  # deleted by another program
        except PartlyDeletedError as error:
            kept.append(f"{run.id} is deleted, but some of its files are {error}.")
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
