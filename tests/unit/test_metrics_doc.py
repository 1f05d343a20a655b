"""docs/metrics.md has the tables of stepscope/common/metrics.py, and the source of each metric."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.common.metrics import METRICS

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_every_metric_with_unit_and_meaning() -> None:
    page = DOC.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| [^|]+ \| ([^|]+\.) \|$", page, re.MULTILINE)
    assert rows == [(metric.key, metric.unit or "–", metric.meaning) for metric in METRICS]
