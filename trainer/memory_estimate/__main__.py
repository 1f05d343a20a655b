"""`python -m trainer.memory_estimate`: measure the memory of a run, for `MemoryProbeRun`.

Reads a job, a line of JSON, from stdin, and ends with stdin. Writes lines of JSON to stdout:
`progress` and `share`, then the `answer`, or the `reason` of a failure.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.host.child_process import call_at_end_of, kill_own_group
from stepscope.store import StoreError
from trainer.config import RunConfig
from trainer.memory_estimate import ProbeError
from trainer.memory_estimate.batch_size import find_batch_sizes
from trainer.runners.child_process import MemoryProbeRun

RATE_SECONDS = 1.0  # Time that each probe of the search trains for, after its first step.

Progress = Callable[[str, float], None]  # Called with the current activity and the fraction done.


def main() -> None:
    # Output of torch or a workload must not mix with the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    def progress(text: str, share: float) -> None:
        write(progress=text, share=share)

    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_own_group)
    try:
        config = RunConfig.from_dict(job["config"])
        found = _search(config, progress) if job["search"] else _probe(config, job, progress)
    except (ConfigError, ProbeError, OSError, StoreError) as error:
        write(reason=str(error))
    else:
        write(answer=found)


def _probe(config: RunConfig, job: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    progress("Loading PyTorch", 0.1)
    # Imported here because importing torch takes seconds.
    devices = importlib.import_module("trainer.training.devices").list_devices()
    device = next(device for device in devices if device.id == config.device)
    probe = importlib.import_module("trainer.memory_estimate.probe")
    folder = Path(job["folder"])
    found: dict[str, Any] = probe.measure(
        config, device, folder, seconds=job["seconds"], progress=progress
    )
    return found


def _search(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Find batch sizes with a process for each probe. Raises ProbeError and OSError."""
    count = 0

    def measure(size: int) -> Mapping[str, Any]:
        nonlocal count
        progress(f"Measuring batch size {size:,}", count / (count + 4))
        count += 1
        probe = MemoryProbeRun(replace(config, batch_size=size), seconds=RATE_SECONDS)
        probe.wait()
        output = probe.output()
        if output.reason is not None:
            raise ProbeError(f"Batch size {size:,}: {output.reason}")
        return output.answer

    return find_batch_sizes(config, measure)


if __name__ == "__main__":
    main()
