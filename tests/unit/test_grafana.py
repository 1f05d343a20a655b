"""The Grafana dashboard follows the rules of Grafana's dashboard linter that we rely on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stepscope.export.prometheus import GPU_METRICS, RUN_METRICS
from tests.support.grafana import PANELS

SOURCE = {"type": "prometheus", "uid": "$datasource"}
WITHOUT_METRIC = (
    *("up", "gpu_info", "gpu_up", "gpu_throttled", "gpu_temperature_slowdown_celsius"),
    *("run_info", "run_steps_total", "run_heartbeat_timestamp_seconds"),
)
KNOWN = {
    f"stepscope_{name}" for name in (*GPU_METRICS.values(), *RUN_METRICS.values(), *WITHOUT_METRIC)
}
SELECTOR = re.compile(r"(stepscope_\w+)\{([^}]*)\}")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_each_panel(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == SOURCE
    assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        expr = target["expr"]
        names, selectors = zip(*SELECTOR.findall(expr), strict=True)
        assert len(names) == len(re.findall("stepscope_", expr)), "each has a selector"
        for selector in selectors:
            assert 'job=~"$job", instance=~"$instance"' in selector
        assert not re.search(r'(?<!~)="\$', expr), "a variable may have several values"
        assert re.findall(r"\[(.*?)\]", expr) in ([], ["$__rate_interval"])
        for name in names:
            rated = f"rate({name}" in expr or f"increase({name}" in expr
            assert rated is name.endswith("_total"), name
            assert name in KNOWN
