"""Jobs of several ranks, by torchrun: what they are asked, and what they have recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.run import RunStatus, read_run
from tests.support.child_process import ROOT, run_python
from tests.support.run_values import metric
from trainer.config import RunConfig, Runner, Strategy

PROGRAM = ROOT / "tests" / "scripts" / "training_ranks.py"
TIMEOUT_S = 300.0


def job(config: RunConfig, parallel: Strategy, ranks: int, **changes: Any) -> RunConfig:
    """Return the job of so many ranks that has the global batches of a run of one process."""
    return replace(
        config,
        runner=Runner.TORCHRUN,
        strategy=parallel,
        devices_per_node=ranks,
        batch_size=config.batch_size // ranks,
        **changes,
    )


def launch(
    ranks: int,
    folder: Path,
    configs: Mapping[str, RunConfig],
    *,
    fails: Mapping[str, tuple[int, int]] | None = None,
    saves: Mapping[str, int] | None = None,
    scale: Mapping[str, float] | None = None,
    **env: str,
) -> str:
    """Train configurations in turn, in one job or, without ranks, one process; return its output.

    `fails`, `saves`, `scale` are told in tests/scripts/training_ranks.py; what fails is the last.
    """
    planted = {"fails": fails or {}, "saves": saves or {}, "scale": scale or {}}
    jobs = {
        name: {"config": config.to_dict()}
        | {what: of_job[name] for what, of_job in planted.items() if name in of_job}
        for name, config in configs.items()
    }
    listed = folder / f"jobs-{ranks}.json"
    listed.write_text(json.dumps(jobs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = [*(torchrun if ranks else []), str(PROGRAM), str(listed), str(folder)]
    done = run_python(*program, cwd=folder, timeout_s=TIMEOUT_S, OMP_NUM_THREADS="1", **env)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == bool(fails), output[-4000:]
    for name in configs:
        if name not in (fails or {}):
            status = read_run(folder / name)
            assert status.status is RunStatus.FINISHED, (name, status.reason, output[-4000:])
    return output


def mean_loss(folder: Path) -> np.ndarray:
    """Return the mean of the ranks' losses of each step: that of the global batch."""
    ranks = range(len(list(folder.glob("rank*.sqlite"))))
    mean: np.ndarray = np.mean([metric(folder, "train/loss", rank=rank) for rank in ranks], axis=0)
    return mean
