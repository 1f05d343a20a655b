"""Entry of a child process: `python -m trainer.runners.worker RUN_FOLDER`, config JSON on stdin.

The run stops at its next step boundary on SIGTERM, on SIGINT, and when stdin ends because the
parent is gone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

from trainer.config import RunConfig


def main() -> None:
    """Run one training to its end."""
    # Not at the head: each data-loading worker imports this file, and takes a second for that.
    training = importlib.import_module("trainer.training.train")
    config = RunConfig.from_dict(json.loads(sys.stdin.readline()))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(
        target=_stop_with_parent, args=(stop,), name="stepscope-parent", daemon=True
    ).start()
    # What was imported stays: each full collection would walk all of it, at the cost of steps.
    gc.freeze()
    training.run(config, Path(sys.argv[1]), stop=stop)


def _stop_with_parent(stop: threading.Event) -> None:
    # The parent writes nothing more. Not through sys.stdin: a thread that waits while holding its
    # buffer's lock makes the interpreter abort at its end.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    stop.set()


if __name__ == "__main__":
    main()
