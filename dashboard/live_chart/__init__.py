"""The browser components: a run's header, tiles, charts and events; its memory.

Each component polls `/api/series` for new points: a script run sends
configuration but no samples. Streamlit sends inline source with every message, so only a loader is
inline, and the browser fetches the modules from a route of this server, once. (A file-backed
component needs a package of its own name on the path; a checkout has none.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

if TYPE_CHECKING:
    from streamlit.components.v2.bidi_component import ComponentResult

_FOLDER = Path(__file__).parent
_STYLES = (_FOLDER / "live.css").read_text(encoding="utf-8")
# The cartesian bundle of plotly.js (npm: plotly.js-cartesian-dist-min), compressed as it is served.
# The plotly package has only the full bundle, which takes 1 s longer to load (docs/performance.md).
PLOTLY = _FOLDER / "plotly" / "plotly-cartesian-4.1.1.min.js.gz"
PLOTLY_URL = f"/vendor/{PLOTLY.stem}"

MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.js"))}
"""The JavaScript modules by file name, served at MODULES_PATH."""
VERSION = hashlib.sha256("".join(MODULES.values()).encode()).hexdigest()[:16]
"""Part of the modules' address, which their relative imports inherit."""
MODULES_PATH = "/vendor/live/{version}/{name}"


def _loader(module: str, export: str) -> str:
    """Return JavaScript that loads a module and calls one of its exports.

    plotly.js begins to load at once, as its evaluation takes longer than loading all other modules.
    """
    address, parts = (
        MODULES_PATH.format(version=VERSION, name=name) for name in (module, "dom.js")
    )
    return f"""
const loaded = import(new URL("{address}", document.baseURI).href);
const parts = import(new URL("{parts}", document.baseURI).href);
export default function load(component) {{
  let closed = false;
  let close = () => {{}};
  const {{ plotly, run }} = component.data;
  // The module reports a failure.
  if (run) parts.then(({{ loadPlotly }}) => loadPlotly(plotly)).catch(() => {{}});
  loaded.then((module) => {{ if (!closed) close = module.{export}(component); }});
  return () => {{ closed = true; close(); }};
}}
"""


def _component(name: str, export: str) -> Callable[..., ComponentResult]:
    """Register an export of the module `name` as a Streamlit component."""
    return st.components.v2.component(
        f"stepscope_{name}", js=_loader(f"{name}.js", export), css=_STYLES, isolate_styles=False
    )


_mount = _component("live", "stepscopeLive")


def _rerun() -> None:
    """Rerun the script, as every callback does."""


def live_chart(
    run_id: str | None,
    layout: dict[str, Any] | None,
    header: dict[str, Any],
    *,
    key: str,
    page_token: str,
    **callbacks: Callable[[], None],
) -> ComponentResult:
    """Mount the header and, for a run, its live charts.

    `layout` comes from `dashboard.charts.layout`, `header` from `dashboard.views.live_panel`. The
    component reruns the script once the server has another `page_token`. The callbacks
    `on_tab_change`, `on_run_change`, `on_setting_change` and `on_retry_change` read the component's
    value of the same name: `tab`, `run` (an id), `setting` (with `field` and `value`).
    """
    data = {
        "run": run_id,
        "page_token": page_token,
        "plotly": PLOTLY_URL,
        "layout": layout,
        "header": header,
    }
    return _mount(key=key, data=data, on_stale_change=_rerun, **callbacks)
