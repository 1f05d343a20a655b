"""Jobs over NCCL that hang: torch's watchdog and our finding agree."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from stepscope.distributed.hangs.cases import HangCause
from stepscope.run import RunStatus, read_run
from tests.conftest import Need
from tests.gpu.conftest import SIMULATED
from tests.support.jobs import Job, hanging, named_hang

pytestmark = pytest.mark.timeout(300)  # jobs take a minute to start on a busy machine
TIMEOUT_S = 25
ENDS_S = 90.0
"""Longest time from the time-out of a collective to the end of the job."""


def test_torchs_watchdog_and_the_finding_name_the_same(need: Need, tmp_path: Path) -> None:
    _several(need, 2)
    devices = 4 if SIMULATED or torch.cuda.device_count() >= 4 else 2
    with hanging(
        "sleep",
        tmp_path,
        ranks=devices,
        backend="nccl",
        CUDASIM_DEVICES=str(devices),
        HANGING_TIMEOUT_S=str(TIMEOUT_S),
    ) as job:
        found = named_hang(job)
        assert (found.cause, found.ranks) == (HangCause.NOT_ENTERED, (1,)), found.text
        assert found.operation is not None
        sequence = int(found.operation.partition("#")[2].split()[0])
        _wait_for_end(job)
        said = job.log.read_text()
    assert f"SeqNum={sequence}, OpType=ALLREDUCE" in said
    assert read_run(job.folder).status in (RunStatus.CRASHED, RunStatus.FAILED)


@pytest.mark.parametrize(
    ("what", "cause", "words"),
    [
        ("mismatch", HangCause.MISMATCH, "in all_gather"),
        ("receive", HangCause.ORDER, "in recv 1<-0"),
    ],
)
def test_how_ranks_hang_over_nccl(
    need: Need, tmp_path: Path, what: str, cause: HangCause, words: str
) -> None:
    _several(need, 2)
    with hanging(what, tmp_path, backend="nccl", CUDASIM_DEVICES="2") as job:
        found = named_hang(job)
        assert found.cause is cause, found.text
        assert words in found.text


def _several(need: Need, devices: int) -> None:
    enough = SIMULATED or torch.cuda.device_count() >= devices
    need(None if enough else f"fewer than {devices} GPUs here")


def _wait_for_end(job: Job) -> None:
    until = time.monotonic() + TIMEOUT_S + ENDS_S
    while job.process.poll() is None:
        assert time.monotonic() < until, job.log.read_text()[-3000:]
        time.sleep(0.5)
