"""A memory estimate for a page: `python -m trainer.memory_estimate.job`.

stdin has one line of JSON, the job. Each line of stdout is a JSON object: `progress` and `share`,
then `answer`, or the `reason` of a failure. The process ends when its stdin is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig
from trainer.parent_death_signal import call_at_end_of, kill_group


def main() -> None:
    """Answer one job."""
    # What torch or a workload prints must not mix with the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=out, flush=True)

    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_group)
    write({"progress": "Loading PyTorch", "share": 0.02})
    # Imported here because importing torch takes seconds, in which the page may stop this process.
    devices = importlib.import_module("trainer.devices").list_devices
    answer = importlib.import_module("trainer.memory_estimate.estimate").answer
    command = importlib.import_module("trainer.memory_estimate.__main__")
    run_failed = importlib.import_module("trainer.error_messages").RunFailedError
    try:
        config = RunConfig.from_dict(job["config"])
        found = answer(
            config,
            command.device_of(config, devices()),
            Path(job["runs"]),
            largest=bool(job["largest"]),
            probe=bool(job["probe"]),
            say=lambda text, share: write({"progress": text, "share": share}),
        )
    except (ConfigError, run_failed) as error:
        write({"reason": str(error)})
    except (OSError, MemoryError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        write({"reason": f"The prediction failed: {first[:300]}"})
    else:
        write({"answer": found})


if __name__ == "__main__":
    main()
