"""Every metric Stepscope records, in one table a stream.

`docs/metrics.md` is written from these tables; a test compares them.
"""

from stepscope.metrics.devices import DEVICES
from stepscope.metrics.metric import Metric, Stream, Unit
from stepscope.metrics.samples import SAMPLES
from stepscope.metrics.steps import STEPS
from stepscope.metrics.throttling import throttle_words

METRICS: tuple[Metric, ...] = (*STEPS, *SAMPLES, *DEVICES)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}

__all__ = ["BY_KEY", "METRICS", "Metric", "Stream", "Unit", "throttle_words"]
