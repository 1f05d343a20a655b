"""Run programs in processes of their own: one, or one for each rank of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stepscope.host.child_process import free_port

TIMEOUT_S = 100
RANK_HEAD = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
"""


def ranks(
    n: int, program: str, folder: Path, *, launcher: bool = True, **env: str
) -> list[tuple[int, str]]:
    """Run a program as `n` ranks; return exit codes and outputs.

    `launcher`: torchrun starts them and answers for all; otherwise each answers for itself.
    """
    path = folder / "program.py"
    path.write_text(RANK_HEAD + program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    shared = {**os.environ, "CUDASIM_DEVICES": str(n), "OMP_NUM_THREADS": "1", **env}
    shared |= {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, *(torchrun if launcher else []), str(path)],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(1 if launcher else n)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
