"""`python -m docs.metrics > docs/metrics.md` writes the tables of metrics as text."""

from __future__ import annotations

import sys

from stepscope.metrics import METRICS
from stepscope.metrics.metric import Metric, Stream


def metrics_markdown() -> str:
    """Return `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Written from `stepscope/metrics/` by `python -m docs.metrics > docs/metrics.md`.",
        "A value that its source does not give is missing: a gap in the chart, never 0.",
        "Values that change slowly are read once or twice a second, energy every two seconds, the",
        "temperature margin every five, those of health every ten; rows between lack them.",
    ]
    for stream, heading in _HEADINGS.items():
        lines += ["", f"## {heading}", "", "| Metric | Unit | Source | Meaning |", "|-|-|-|-|"]
        lines += [_markdown_row(metric) for metric in METRICS if metric.stream is stream]
        lines += ["", *_DERIVED] if stream is Stream.STEPS else []
    return "\n".join(lines) + "\n"


_DERIVED = (
    "A script may have several optimizers, with several parameter groups. The first optimizer has",
    "the keys above; the one that stepped second has `train/loss.optimizer1`,",
    "`train/lr.optimizer1`, `train/grad_norm.optimizer1` and `train/backwards.optimizer1`, and so",
    "on; `optimizers` in `run.json` names them in this order. The learning rate of a second group",
    "is `train/lr.group1` (of optimizer 1: `train/lr.optimizer1.group1`). Units and meanings are",
    "those of the keys above. At most 8 optimizers and 8 groups of each are recorded.",
    "",
    "Other keys of this stream were logged by the script; `custom` in `run.json` lists them.",
)

_HEADINGS = {
    Stream.STEPS: "`steps`: one row per optimizer step",
    Stream.SAMPLES: "`samples`: one row per tick of the sampler (10 Hz)",
    Stream.DEVICES: "`devices`: one row per GPU and tick",
}


def _markdown_row(metric: Metric) -> str:
    unit = metric.unit or "–"
    return f"| `{metric.key}` | {unit} | {metric.source} | {metric.meaning} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
