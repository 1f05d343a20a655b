"""The connection to the host of a remote run, and what has been received of the run, as text."""

from __future__ import annotations

import math
import time
from typing import Any

from stepscope.common.formatting import printable
from stepscope.remote.source import ConnectionState, RemoteSource
from stepscope.run import RunInfo
from stepscope.store import STORE_NAME


def connection_text(state: ConnectionState) -> str:
    """Return "connected · 34 ms", "reconnecting in 8 s", or "cannot connect, retry in 8 s"."""
    if state.connected:
        delay_s = state.delay_s
        return "connected" if delay_s is None else f"connected · {1000 * delay_s:,.0f} ms"
    left_s = (state.retry_at or 0.0) - time.monotonic()
    if left_s <= 0:
        return "connecting…"
    found = "cannot connect, retry" if state.delay_s is None else "reconnecting"
    return f"{found} in {math.ceil(left_s)} s"


def connection_problem(state: ConnectionState) -> str:
    """Return the message of ssh, with its punctuation; "" without one."""
    text = printable(state.text or "").strip().rstrip(".")
    return f": {text}." if text else "."


def source_state(source: RemoteSource, run: RunInfo) -> dict[str, Any]:
    """Return the part of a poll's answer about the connection of a remote run.

    `text` is its badge, `note` set while the run is loaded, `lost` while its page is out of date.
    """
    state = source.state()
    label = printable(source.label)
    problem = connection_problem(state)
    loaded = (run.folder / STORE_NAME).exists()
    note = lost = None
    if not loaded:
        note = f"Loading the run from {label}…"
        if not state.connected:
            note = f"The run will be loaded when {label} is connected{problem}"
    elif run.status.live and not state.connected:
        lost = f"Not connected to {label}{problem} The data are as of {_received(run)}."
    text = f"{label} · {connection_text(state).removeprefix('connected · ')}"
    return {"text": text, "connected": state.connected, "note": note, "lost": lost}


def _received(run: RunInfo) -> str:
    """Return the local time at which the run was last received, with the date of another day."""
    moment = time.localtime(run.run_json["mirror"]["received"])
    today = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%d %b %H:%M:%S", moment)
