"""The history of this machine's GPUs as a figure. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.machine.machine_poller import PastReading
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.gpu.device_info import DeviceInfo

# Distinct, with a contrast of at least 3:1 on the light and the dark background.
COLORS = ("#8d5df8", "#8a9220", "#0b93b8", "#db3cfc", "#e0455a", "#a9701a", "#0a9a75", "#7a8490")
MIN_SPAN_S = 60  # the first seconds do not fill the width
MAX_SPAN_S = 600


def history_figure(
    metric: str, gpus: Sequence[DeviceInfo], past: Sequence[PastReading], now: float
) -> Json:
    """Return the last ten minutes of a metric, a line per GPU by its index."""
    unit = BY_KEY[metric].unit
    ages = np.round([reading.ts - now for reading in past], 1)
    columns = {
        gpu.nvml_index: np.array(
            [reading.gpus.get(gpu.uuid, {}).get(metric) for reading in past], float
        )
        for gpu in gpus
    }
    top = max((float(np.nanmax(values, initial=0.0)) for values in columns.values()), default=0.0)
    name, size = figures.unit_of(top) if unit is Unit.BYTES else (unit.value, 1.0)
    lines: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"GPU {index}",
            "x": ages,
            "y": np.round(values / size, 3),
            "line": {"color": COLORS[index % len(COLORS)], "width": 1.6},
        }
        for index, values in columns.items()
    ]
    span = np.clip(-ages[0], MIN_SPAN_S, MAX_SPAN_S)
    fixed = (0.0, 100.0) if unit is Unit.PERCENT else None
    layout = figures.layout(
        260,
        showlegend=True,
        hovermode="x unified",
        xaxis=figures.FIXED | {"range": [-span, 0], "ticksuffix": " s"},
        yaxis=figures.FIXED | {"ticksuffix": f" {name}", "rangemode": "tozero", "range": fixed},
    )
    return {"data": lines, "layout": layout}
