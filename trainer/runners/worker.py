"""Entry of a child process: `python -m trainer.runners.worker RUN_FOLDER`, config JSON on stdin.

The run stops at its next step boundary on SIGTERM, on SIGINT, and when stdin ends because the
parent is gone.
"""

from __future__ import annotations

import gc
import importlib
import json
import signal
import sys
import threading
from pathlib import Path

from trainer.config import RunConfig
from trainer.parent_death_signal import call_at_end_of


def main() -> None:
    """Run one training to its end."""
    # Not at the head: each data-loading worker imports this file, and takes a second for that.
    training = importlib.import_module("trainer.training.train")
    config = RunConfig.from_dict(json.loads(sys.stdin.readline()))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    call_at_end_of(sys.stdin.fileno(), stop.set)  # nothing more is written to it
    # What was imported stays: each full collection would walk all of it, at the cost of steps.
    gc.freeze()
    training.run(config, Path(sys.argv[1]), stop=stop)


if __name__ == "__main__":
    main()
