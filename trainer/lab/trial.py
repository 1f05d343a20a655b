"""One sample: a training run in a fresh process, `python -m trainer.lab.trial`.

The job comes as one line of JSON on stdin, the result goes as one line of JSON to stdout. The
process ends with its sweep, because nobody wants the result then: Linux kills it, and elsewhere a
thread sees the end of stdin, unless native code keeps all threads waiting.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading

from trainer.parent_death_signal import killed_with_parent


def main() -> None:
    """Measure one sample and print it."""
    killed_with_parent()
    # What the training prints must not stand in the line of the result.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="lab-parent", daemon=True).start()
    # Only now: importing torch takes seconds, in which the sweep may be killed.
    sample_run = importlib.import_module("trainer.lab.trial_run")
    gc.freeze()  # what was imported stays: no collection needs to walk it
    print(json.dumps(sample_run.take(job)), file=results, flush=True)


def _end_with_parent() -> None:
    # Not through sys.stdin: a thread that waits while holding its buffer's lock makes the
    # interpreter abort at its end.
    while os.read(0, 1024):
        pass
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with the loader's workers
    os._exit(1)


if __name__ == "__main__":
    main()
