"""The Grafana dashboard and its queries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "stepscope" / "export" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]


def targets() -> list[str]:
    """Return the query of each target."""
    return [target["expr"] for panel in PANELS for target in panel["targets"]]
