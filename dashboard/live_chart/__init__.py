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

_FOLDER = Path(__file__).parent
PLOTLY_URL = f"/vendor/plotly.min.js?v={version('plotly')}"

MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.js"))}
"""The component's JavaScript modules by file name, served at MODULES_PATH."""
VERSION = hashlib.sha256("".join(MODULES.values()).encode()).hexdigest()[:16]
"""Part of the modules' address, so that what they import has it as well."""
MODULES_PATH = "/vendor/live/{version}/{name}"


def _loader(module: str, export: str) -> str:
    """Return a module that stands in for an export of ours until the browser has it."""
    address = MODULES_PATH.format(version=VERSION, name=module)
    return f"""
const loaded = import(new URL("{address}", document.baseURI).href);
export default function load(component) {{
  let closed = false;
  let close = () => {{}};
  loaded.then((module) => {{ if (!closed) close = module.{export}(component); }});
  return () => {{ closed = true; close(); }};
}}
"""


_mount = st.components.v2.component(
    "stepscope_live",
    js=_loader("live.js", "stepscopeLive"),
    css=(_FOLDER / "live.css").read_text(encoding="utf-8"),
    isolate_styles=False,
)
_mount_watch = st.components.v2.component(
    "stepscope_runs", js=_loader("runs.js", "watchRuns"), isolate_styles=False
)


def _rerun() -> None:
    """The callback: naming one makes `result.stale` exist; the rerun itself is enough."""


def live_chart(
    run_id: str,
    layout: dict[str, Any],
    *,
    key: str,
    page_token: str,
    pending_command: int | None = None,
) -> ComponentResult:
    """Mount the live charts of a run and return the component's result.

    `layout` comes from `dashboard.charts.layout`. `page_token` names what the page was built
    from: the component sets `result.stale` (for one script run) once the server names another.
    `pending_command` is the id of a command just sent; the component then polls faster until the
    event with that `command_id` is there.
    """
    data = {
        "run": run_id,
        "page_token": page_token,
        "pending_command": pending_command,
        "plotly": PLOTLY_URL,
        "layout": layout,
    }
    return _mount(key=key, data=data, on_stale_change=_rerun)


def runs_watch(page_token: str, *, key: str) -> ComponentResult:
    """Mount what looks out for runs on a page that shows none; draws nothing.

    It runs the page again once the server names another than `page_token`.
    """
    return _mount_watch(key=key, data={"page_token": page_token}, on_stale_change=_rerun)
