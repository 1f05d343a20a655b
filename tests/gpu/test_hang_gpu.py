"""Jobs over NCCL that hang: torch's watchdog and our finding agree."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from stepscope.distributed import flight_recorder
from stepscope.distributed.flight_recorder import note_captures
from stepscope.distributed.hangs.cases import HangCause
from stepscope.distributed.hangs.record import HangRecord, capture
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


def test_a_look_leaves_a_capture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looks requests no dump while the training captures a graph, then it does.

    torch's dump asks for the events of collectives under way, which would end the capture.
    """
    os.mkfifo(tmp_path / "pipe0.pipe")
    pipe = os.open(tmp_path / "pipe0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv(flight_recorder.PIPE, str(tmp_path / "pipe"))
    monkeypatch.setenv(flight_recorder.FILES[0], str(tmp_path / "dump"))
    monkeypatch.setattr(flight_recorder, "counts", dict)
    monkeypatch.setattr(flight_recorder, "WAIT_S", 0.0)
    monkeypatch.setattr(flight_recorder, "uses_nccl", lambda: True)
    note_captures()
    training = threading.get_ident()
    known = HangRecord(number=0, rank=0, step=9, since=0.0, seen=0.0)
    graph, x, own = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda"), torch.cuda.Stream()
    with ThreadPoolExecutor(1) as other:
        look = partial(other.submit, capture, known, training)
        for stream in (None, own):
            with torch.cuda.graph(graph, stream=stream):
                y = x + 1
                record = look().result(60)
            assert record.collectives_reason == "a CUDA graph is being captured"
            graph.replay()
            assert y.sum().item() == 2000.0
            graph.reset()
        assert os.read(pipe, 10) == b""
        assert "not written" in str(look().result(60).collectives_reason)
        assert os.read(pipe, 10) == b"1"
    os.close(pipe)


def _several(need: Need, devices: int) -> None:
    enough = SIMULATED or torch.cuda.device_count() >= devices
    need(None if enough else f"fewer than {devices} GPUs here")


def _wait_for_end(job: Job) -> None:
    until = time.monotonic() + TIMEOUT_S + ENDS_S
    while job.process.poll() is None:
        assert time.monotonic() < until, job.log.read_text()[-3000:]
        time.sleep(0.5)
