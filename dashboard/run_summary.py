"""What a run came to, in a few numbers: a few frames are read, however long the run."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.store import Block, RunReader, StoreError


@dataclass(frozen=True, slots=True)
class RunSummary:
    """None where the run has not recorded the value; bytes are the highest of the run."""

    best_loss: float | None = None
    """The lowest validation loss; the lowest training loss where nothing is validated."""
    samples_per_s: float | None = None
    """Mean of the steps' rates, the first ones included."""
    peak_allocated: float | None = None
    peak_process: float | None = None


def summarize(run: RunInfo) -> RunSummary:
    """Return the summary of what the run has stored so far, an empty one without a store."""
    try:
        with RunReader(run.folder) as reader:
            whole = {
                info.stream: reader.read(info.id, 0, info.rows, 1 << info.rows.bit_length())
                for info in reader.series()
                if info.stream in (Stream.STEPS, Stream.SAMPLES)
            }
    except StoreError:
        return RunSummary()
    steps, samples = whole.get(Stream.STEPS), whole.get(Stream.SAMPLES)
    validated = _of(steps, "low", "val/loss")
    return RunSummary(
        best_loss=_of(steps, "low", "train/loss") if validated is None else validated,
        samples_per_s=_of(steps, "mean", "perf/samples_per_sec"),
        peak_allocated=_of(samples, "high", "memory/peak_allocated"),
        peak_process=_of(samples, "high", "process/rss"),
    )


def _of(block: Block | None, statistic: str, key: str) -> float | None:
    """Return a statistic of a metric over the block's one bucket."""
    if block is None or key not in block.keys or len(block) == 0:
        return None
    index = block.keys.index(key)
    return float(getattr(block, statistic)[index, -1]) if block.count[index, -1] else None
