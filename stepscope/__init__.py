"""Stepscope: record the training of a script, and read recorded runs.

>>> import stepscope
>>> with stepscope.init("example", config={"lr": 0.1}, sample=False) as rec:
...     for batch in rec.batches([[1.0, 2.0], [3.0, 4.0], [5.0]]):
...         rec.step(loss=sum(batch))        # one optimizer step
...     stepscope.log(val_loss=4.5)          # added to the last step
>>> run = stepscope.open(rec.folder)         # or the name of the folder
>>> run.status, run.config
(<RunStatus.FINISHED: 'finished'>, {'lr': 0.1})
>>> run.series("train/loss").value
array([ 3.,  7.,  5., nan])

The package imports neither torch nor streamlit; it uses torch after the script's import of torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.integrations.notebook import show
    from stepscope.recorded_run import Run
    from stepscope.recorded_run import open_run as open  # noqa: F401 - not in __all__, see there
    from stepscope.run import RunError
    from stepscope.tracker import Tracker, init

__version__ = "0.1.0"
# Without `open`: `from stepscope import *` must not replace the builtin.
__all__ = ["Run", "RunError", "Tracker", "__version__", "init", "log", "show"]

_LAZY_EXPORTS = {
    "init": ("stepscope.tracker", "init"),
    "Tracker": ("stepscope.tracker", "Tracker"),
    "open": ("stepscope.recorded_run", "open_run"),
    "Run": ("stepscope.recorded_run", "Run"),
    "show": ("stepscope.integrations.notebook", "show"),
    "RunError": ("stepscope.run", "RunError"),
}
"""Imported at the first use: numpy and sqlite take 0.2 s, and commands need neither."""


def log(values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
    """Add values to the last step, if this process is recorded. Never raises.

    Under `stepscope watch`, or after `stepscope.init()`, this is `Tracker.log`. Otherwise it does
    nothing and has no cost, so the line may remain in the script.
    """
    tracker = sys.modules.get("stepscope.tracker")
    recording = tracker.current() if tracker is not None else None
    if recording is not None:
        recording.log(values, **metrics)


def __dir__() -> list[str]:
    return [*__all__, "open"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY_EXPORTS[name]
    return getattr(importlib.import_module(module), attribute)
