"""Bytes of the collectives of real gloo ranks in the records of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepscope.run import run_folders
from tests.support.run_values import recorded
from tests.support.watched_scripts import run


@pytest.mark.parametrize("ranks", [2, 1])
def test_the_bytes_of_a_step_are_those_of_gradients_and_buffers(tmp_path: Path, ranks: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", "-m", "stepscope.watch"]
    ended = run([*command, "collectives.py", "gloo", "500", "64"], tmp_path, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr.decode()
    [folder] = run_folders(tmp_path)
    if ranks == 1:
        assert recorded(folder, "comm/bytes") == []
        assert "collectives" not in json.loads((folder / "run.json").read_text())["capabilities"]
        return
    # Two linear layers and a norm, whose running mean, variance and count DDP sends before each
    # forward pass.
    gradients, buffers, _ = map(int, ended.stdout.split())
    assert gradients == 4 * (32 * 64 + 64 + 64 + 64 + 64 * 8 + 8)
    assert buffers == 4 * (64 + 64) + 8
    for rank in (0, 1):
        values = recorded(folder, "comm/bytes", rank)
        # The first may have seen DDP order its buckets, which it does once.
        assert set(values[1:] or values) == {float(gradients + buffers)}
        rates = recorded(folder, "comm/rate", rank)
        assert len(rates) == len(values)
        assert min(rates) > 0
