"""One trial: a training run in a fresh process, `python -m trainer.lab.trial`.

stdin has one line of JSON, the job; stdout gets one line of JSON, the result. The process ends with
its sweep: on Linux the kernel kills it, elsewhere a thread sees that stdin was closed.
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
    """Measure one trial and print its result."""
    killed_with_parent()
    # What the training prints must not mix with the result.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.loads(sys.stdin.readline())
    end_with_stdin()
    # Imported here because importing torch takes seconds, in which the sweep may end.
    trial_run = importlib.import_module("trainer.lab.trial_run")
    gc.freeze()  # imported modules stay: no collection has to traverse them
    print(json.dumps(trial_run.take(job)), file=results, flush=True)


def end_with_stdin() -> None:
    """Start a thread that kills this process and its children when stdin is closed."""
    threading.Thread(target=_end_with_stdin, name="stdin-watch", daemon=True).start()


def _end_with_stdin() -> None:
    # Not sys.stdin: a thread that waits while holding its lock aborts the interpreter at exit.
    while os.read(0, 1024):
        pass
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with the loader's workers
    os._exit(1)


if __name__ == "__main__":
    main()
