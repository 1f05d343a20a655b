"""Entry of a child process: `python -m trainer.runners.worker RUN_FOLDER`, config JSON on stdin.

The run stops at its next step boundary on SIGTERM, on SIGINT, and when the parent closes stdin.
"""

import gc
import importlib
import json
import signal
import sys
import threading
from pathlib import Path

from stepscope.host.child_process import call_at_end_of
from trainer.config import RunConfig

if __name__ == "__main__":
    # Deferred: each data-loading worker imports this file as well.
    training = importlib.import_module("trainer.runners.training_run")
    config = RunConfig.from_dict(json.loads(sys.stdin.readline()))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    call_at_end_of(sys.stdin.fileno(), stop.set)
    gc.freeze()  # full collections need not visit the imported modules
    training.run(config, Path(sys.argv[1]), stop=stop)
