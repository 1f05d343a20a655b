"""docs/metrics.md says what stepscope/metrics/ says."""

from __future__ import annotations

from pathlib import Path

from docs.metrics import metrics_markdown
from stepscope.metrics import METRICS

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_what_the_table_writes() -> None:
    remedy = "run: python -m docs.metrics > docs/metrics.md"
    assert DOC.read_text(encoding="utf-8") == metrics_markdown(), remedy
    page = metrics_markdown()
    for metric in METRICS:
        assert page.count(f"| `{metric.key}` |") == 1
        assert metric.meaning.endswith("."), metric.key
        assert "|" not in metric.source + metric.meaning, metric.key
