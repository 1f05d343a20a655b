"""A rank of a job over nccl that sleeps in forward is named, at the price of a few waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.diagnosis.findings import read_recorded
from stepscope.distributed.ddp_timing import LEAST_CUDA
from stepscope.distributed.stragglers.detect import find_straggler
from stepscope.distributed.stragglers.step_phases import StepPhase
from stepscope.run import read_run, run_folders
from tests.gpu.conftest import simulator_only
from tests.support.child_process import ROOT

SCRIPT = ROOT / "tests" / "scripts" / "nccl_straggler.py"
STEPS, SLEEP_S = 400, 0.04
"""A sleep that stands out also where other programs share the cores."""


pytestmark = pytest.mark.usefixtures("two_devices")


def waits(tmp_path: Path, sleep_s: float, *how: str, steps: int = STEPS) -> dict[int, int]:
    """Run a job of two ranks; return how often each has waited for its device."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", *how, str(SCRIPT), str(steps), str(sleep_s)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "STEPSCOPE_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "will be missing" not in done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["rank"]: one["waits"] for one in told}


@simulator_only
@pytest.mark.timeout(300)
def test_a_rank_that_sleeps_in_forward_is_named_and_steps_wait_no_more_often(
    tmp_path: Path,
) -> None:
    bare = waits(tmp_path, 0.0)
    watched = waits(tmp_path, SLEEP_S, "-m", "stepscope.watch")
    for rank in (0, 1):
        # DDP waits for its own samples: every 100 steps by itself, at most every 17 under watch.
        more = watched[rank] - bare[rank]
        assert more <= 8 * STEPS / LEAST_CUDA, "some calls a sample, none a step"
    (folder,) = run_folders(tmp_path)
    recorded = read_recorded(read_run(folder))
    assert recorded.straggler is None, "the times of simulated GPUs are not judged for the user"
    found = find_straggler(
        [one.times for one in recorded.ranks if one.times is not None], world_size=2
    )
    assert (found.ranks, found.phase) == ((1,), StepPhase.FORWARD)
    assert found.share is not None
    assert found.share > 0.2
