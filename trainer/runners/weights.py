"""Extracts weights with resource limits: `python -m trainer.runners.weights CHECKPOINT`."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from stepscope.common.formatting import printable
from stepscope.host.process_limits import limit_process, set_parent_death_signal
from stepscope.run import RunError
from trainer.runners.child_process import PROJECT

TIME_LIMIT_S = 300.0
CPU_LIMIT_S = 120
MEMORY_BYTES = 2 * 10**9  # for PyTorch; four times the file's size is added for its tensors


def read_weights(path: Path) -> bytes:
    """Return a checkpoint's weights as a `.pt` file. Raises RunError and OSError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.runners.weights", str(path.absolute())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # stacks of threads count as memory
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{path.name}: took more than {TIME_LIMIT_S:.0f} s to read.") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode < 0:
        how = signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
        raise RunError(f"{path.name}: reading it ended the process ({how}). Check the file.")
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["unknown error"]
    raise RunError(f"{path.name}: {printable(last[0])[:600]}")


def main(path: Path) -> int:
    set_parent_death_signal()
    checkpoint = importlib.import_module("trainer.training.checkpoint")
    try:
        memory = MEMORY_BYTES + 4 * path.stat().st_size
        limit_process(memory=memory, cpu_s=CPU_LIMIT_S, file_bytes=0, counted=resource.RLIMIT_DATA)
        weights = checkpoint.weights_bytes(path)
    except (checkpoint.CheckpointError, MemoryError, OSError) as error:
        reason = str(error) or "it needs more memory than a checkpoint does."
        sys.stderr.write(f"{printable(reason)}\n")
        return 1
    sys.stdout.buffer.write(weights)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
