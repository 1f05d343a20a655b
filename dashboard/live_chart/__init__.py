"""The live page's one browser component: all live charts, numbers and events of a run.

It keeps its DOM for its life and polls `/api/series` for new points only, so a script run sends
configuration, never samples. Streamlit sends a component's inline source with every message, so
only a loader is inline; the browser fetches the rest from a route of ours, once. (A file-backed
component would need an installed package; Stepscope runs from a checkout.)
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

if TYPE_CHECKING:
    from streamlit.components.v2.bidi_component import ComponentResult

# One module scope in the browser: concatenated in this order, only the last one exports.
SCRIPTS = (
    "format.js",
    "store.js",
    "theme.js",
    "header.js",
    "events.js",
    "card.js",
    "fit.js",
    "poll.js",
    "detail.js",
    "live.js",
)
PLOTLY_URL = f"/vendor/plotly.min.js?v={version('plotly')}"

_FOLDER = Path(__file__).parent


SOURCE = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
"""The component's JavaScript as one module, served at SOURCE_PATH."""
SOURCE_PATH = "/vendor/live.js"

_ADDRESS = f"{SOURCE_PATH}?v={hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}"
LOADER = f"""
const loaded = import(new URL("{_ADDRESS}", document.baseURI).href);
export default function load(component) {{
  let closed = false;
  let close = () => {{}};
  loaded.then((module) => {{ if (!closed) close = module.default(component); }});
  return () => {{ closed = true; close(); }};
}}
"""

_mount = st.components.v2.component(
    "stepscope_live",
    js=LOADER,
    css=(_FOLDER / "live.css").read_text(encoding="utf-8"),
    isolate_styles=False,
)


def _rerun() -> None:
    """The status callback: naming one makes `result.status` exist; the rerun itself is enough."""


def live_chart(
    run_id: str,
    layout: dict[str, Any],
    *,
    key: str,
    status: str | None = None,
    pending_command: int | None = None,
) -> ComponentResult:
    """Mount the live charts of a run and return the component's result.

    `layout` comes from `dashboard.charts.layout`. `status` is the run status that the page was
    built with: the component sets `result.status` (for one script run) once the run's real status
    differs. `pending_command` is the id of a command just sent; the component then polls faster
    until the event with that `command_id` is there.
    """
    data = {
        "run": run_id,
        "status": status,
        "pending_command": pending_command,
        "plotly": PLOTLY_URL,
        "layout": layout,
    }
    return _mount(key=key, data=data, on_status_change=_rerun)
