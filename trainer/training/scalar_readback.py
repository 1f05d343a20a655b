"""How the loop's scalars (loss, gradient norm, …) become numbers: at once on a CPU.

On a GPU `trainer.training.cuda_timing.TimedScalars` brings them some steps later.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepscope.recorder.cuda_readback import MetricRow, RowSink
from trainer.training.cuda_timing import TimedScalars


class HostReader:
    """On a CPU the values are there at once."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self.dropped = 0
        """As of DeviceScalars; nothing is dropped here."""

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Log the row with the scalars (0-d tensors) read into it."""
        for key, scalar in scalars.items():
            row[key] = scalar.item()
        self._sink(step, ts, row)

    def poll(self) -> None:
        """Do nothing: every row has been logged."""

    def flush(self) -> None:
        """Do nothing: every row has been logged."""

    def discard(self) -> None:
        """Do nothing: no row is under way."""


Reader = HostReader | TimedScalars
