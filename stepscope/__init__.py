"""Stepscope's telemetry library: runs, metrics, the sampler and the store.

It imports neither torch nor streamlit, so that a training script can import it at no cost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.tracker import Tracker, init

__version__ = "0.1.0"
__all__ = ["Tracker", "__version__", "init", "log"]


def log(values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
    """Record values of the script's own beside the last step, where something is recording.

    Under `stepscope watch`, or after `stepscope.init()`, it is `Tracker.log`; else it does nothing,
    and costs nothing: the line may stay in the script. Never raises.
    """
    tracker = sys.modules.get("stepscope.tracker")
    recording = tracker.current() if tracker is not None else None
    if recording is not None:
        recording.log(values, **metrics)


def __getattr__(name: str) -> Any:
    """Import `init` and `Tracker` when they are asked for: the command line needs neither."""
    if name in ("init", "Tracker"):
        from stepscope import tracker  # noqa: PLC0415 - numpy and sqlite take 0.2 s

        return getattr(tracker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
