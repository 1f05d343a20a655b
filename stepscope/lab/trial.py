"""One trial in a fresh process: `python -m stepscope.lab.trial MODULE`.

`run_trial` of the module gets the job, one line of JSON on stdin, and returns the result, one line
of JSON on stdout. The process ends with its sweep: on Linux the kernel kills it, elsewhere a thread
notices the end of stdin. Data-loading workers may import this module, so its imports stay light.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

from stepscope.host.child_process import call_at_end_of, kill_own_group, set_parent_death_signal


def main(module: str) -> None:
    set_parent_death_signal()
    # Output of the training must not mix with the result.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_own_group)
    # Imported here because importing torch takes seconds, in which the sweep may end.
    trial_run = importlib.import_module(module)
    gc.freeze()  # imported modules stay: no collection has to traverse them
    print(json.dumps(trial_run.run_trial(job)), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
