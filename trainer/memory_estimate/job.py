"""A prediction for a page: `python -m trainer.memory_estimate.job`.

The job is one line of JSON on stdin. Each line on stdout is a JSON object: `progress` and `share`
while it works, then `answer`, or the `reason` why there is none. The process ends when its stdin
ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig


def main() -> None:
    """Answer one job."""
    # What torch or a workload prints must not stand between the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=out, flush=True)

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="fit-parent", daemon=True).start()
    say({"progress": "Loading PyTorch", "share": 0.02})
    # Only now: importing torch takes seconds, in which the page may stop this.
    devices = importlib.import_module("trainer.devices").list_devices
    estimate = importlib.import_module("trainer.memory_estimate.estimate").answer
    command = importlib.import_module("trainer.memory_estimate.__main__")
    failed = importlib.import_module("trainer.error_messages").RunFailed
    try:
        config = RunConfig.from_dict(job["config"])
        device = command.device_of(config, devices())
        answer = estimate(
            config,
            device,
            Path(job["runs"]),
            largest=bool(job["largest"]),
            probe=bool(job["probe"]),
            say=lambda text, share: say({"progress": text, "share": share}),
        )
    except (ConfigError, failed) as error:
        say({"reason": str(error)})
    except (OSError, MemoryError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        say({"reason": f"The prediction failed: {first[:300]}"})
    else:
        say({"answer": answer})


def _end_with_parent() -> None:
    # Not through sys.stdin: a thread that waits while holding its buffer's lock makes the
    # interpreter abort at its end.
    while os.read(0, 1024):
        pass
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
