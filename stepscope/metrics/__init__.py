"""Every metric Stepscope records, in one table a stream; docs/metrics.md is written from them."""

from stepscope.metrics.device_metrics import DEVICES
from stepscope.metrics.metric import Metric, Stream, Unit
from stepscope.metrics.process_metrics import SAMPLES
from stepscope.metrics.step_metrics import STEPS

METRICS: tuple[Metric, ...] = (*STEPS, *SAMPLES, *DEVICES)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}

__all__ = ["BY_KEY", "METRICS", "Metric", "Stream", "Unit"]
