"""Reads the weights of a checkpoint in a process with limits: a foreign file may break its reader.

    python -m trainer.runners.weights CHECKPOINT

On stdout stands the file with the weights, on stderr one line if there is none.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from stepscope.common.formatting import printable
from stepscope.common.limited_process import limit_process
from stepscope.run import RunError
from trainer.parent_death_signal import set_parent_death_signal

TIME_LIMIT_S = 300.0
CPU_LIMIT_S = 120
MEMORY = 2 * 10**9
"""Bytes beside four times those of the file: PyTorch's own, and the copies of a tensor."""
_PROJECT = Path(__file__).resolve().parents[2]


def read_weights(path: Path) -> bytes:
    """Return the model's weights alone as a `.pt` file, for `load_state_dict` elsewhere.

    Raises RunError with a sentence, and OSError where no process can be started.
    """
    words = [sys.executable, "-m", "trainer.runners.weights", str(path.absolute())]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=_PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # stacks of others would count as memory
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{path.name}: took more than {TIME_LIMIT_S:.0f} s to read.") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode < 0:
        how = signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
        raise RunError(
            f"{path.name}: broke the process that read it ({how}), as no checkpoint does."
        )
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it gives no reason"]
    raise RunError(f"{path.name}: {printable(last[0])[:600]}")


def main(path: Path) -> int:
    """Print the weights; return the exit code."""
    set_parent_death_signal()
    checkpoint = importlib.import_module("trainer.training.checkpoint")
    try:
        memory = MEMORY + 4 * path.stat().st_size
        limit_process(memory=memory, cpu_s=CPU_LIMIT_S, file_bytes=0, counted=resource.RLIMIT_DATA)
        weights = checkpoint.weights_bytes(path)
    except (checkpoint.CheckpointError, MemoryError, OSError) as error:
        sys.stderr.write(
            f"{printable(str(error) or 'it needs more memory than a checkpoint does.')}\n"
        )
        return 1
    sys.stdout.buffer.write(weights)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
