"""The run that the page shows, and its label; `st.session_state[RUN]` is its id."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import streamlit as st

from dashboard.charts.run_view import KINDS, NAME_LENGTH, run_kind, run_name
from dashboard.run_list import Listing
from dashboard.services import Services
from stepscope.common.formatting import format_duration, printable
from stepscope.remote.access import read_only_reason
from stepscope.run import RunInfo, is_local, is_run_id

RUN = "run"
_CHOSEN = "run_chosen"
_ENDED = "run_ended_when_shown"


def picked_run(server: Services, listing: Listing) -> str | None:
    """Return the id of the run to show; None without runs.

    A run chosen by the user or the URL stays. Otherwise it is the active run, the newest live one
    of this machine, or the newest one; a run that begins replaces the latter.
    """
    state = st.session_state
    if RUN not in state and "run" in st.query_params:
        state[RUN], state[_CHOSEN] = st.query_params["run"], True
    picked: str | None = state.get(RUN)
    if not state.get(_CHOSEN) and picked in (None, state.get(_ENDED)):
        live = server.active_id() or newest_live(listing.runs)
        newest = listing.runs[0].id if listing.runs else None
        state[RUN] = picked = live or picked or newest
        state[_ENDED] = None if live else picked
    return picked


def choices(
    picked: str | None, listing: Listing, roots: Mapping[Path, str | None]
) -> list[tuple[str, str]]:
    """Return ids and labels: live runs first, then the newest; an unlisted `picked` before all."""
    names = labels(listing.runs, roots)
    unlisted = [(picked, picked)] if picked and picked not in names else []
    return [*unlisted, *names.items()]


def choose(run_id: str | None) -> None:
    """Show this run from now on, as chosen by the user; no run for None or ""."""
    if not run_id or is_run_id(run_id):
        st.session_state[RUN] = run_id or None
        st.session_state[_CHOSEN] = True


def newest_live(runs: Sequence[RunInfo]) -> str | None:
    """Return the newest live run of this machine, those of this user first."""
    here = [run for run in runs if run.status.live and is_local(run)]
    newest = max(here, key=lambda run: (read_only_reason(run) is None, run.created), default=None)
    return None if newest is None else newest.id


def labels(runs: Iterable[RunInfo], roots: Mapping[Path, str | None]) -> dict[str, str]:
    """Return a different label for each run, by its id: name, kind, status and times.

    Runs of a folder with a label in `roots` end in that label, other runs of others in user@host.
    """
    return distinct({run.id: _label(run, roots.get(run.folder.parent)) for run in runs})


def distinct(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels by id, with the id added to equal ones."""
    seen = Counter(labels.values())
    return {
        name: label if seen[label] == 1 else f"{label} · {name}" for name, label in labels.items()
    }


def _label(run: RunInfo, source: str | None) -> str:
    live = run.status.live
    when = time.strftime("%d %b %H:%M", time.localtime(run.created))
    parts = [
        f"● {run_name(run)}" if live else run_name(run),
        KINDS[run_kind(run)],
        str(run.status),
        f"since {when}" if live else when,
    ]
    if not live and run.ended is not None:
        parts.append(format_duration(max(0.0, run.ended - run.created)))
    if source is not None:
        parts.append(source)
    elif read_only_reason(run) is not None:
        owner = f"{run.run_json.get('user')}@{run.run_json.get('host')}"
        parts.append(printable(owner)[:NAME_LENGTH])
    return " · ".join(parts)
