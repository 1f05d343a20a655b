"""Writes `docs/metrics.md`."""

from __future__ import annotations

import sys

from stepscope.metrics.document import metrics_markdown

sys.stdout.write(metrics_markdown())
