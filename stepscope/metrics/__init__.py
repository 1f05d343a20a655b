"""All recorded metrics, in one table per stream, as in docs/metrics.md."""

from stepscope.metrics.device_metrics import DEVICES
from stepscope.metrics.metric import Metric, Stream, Unit
from stepscope.metrics.process_metrics import SAMPLES
from stepscope.metrics.step_metrics import STEPS

_TABLES = {Stream.STEPS: STEPS, Stream.SAMPLES: SAMPLES, Stream.DEVICES: DEVICES}
METRICS = tuple(
    Metric(stream, key, *texts) for stream, table in _TABLES.items() for key, texts in table.items()
)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}

__all__ = ["BY_KEY", "METRICS", "Metric", "Stream", "Unit"]
