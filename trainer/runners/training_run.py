"""A run from its configuration to its final status, in the calling thread.

run ─> session, device, sampler, process group ─> trainer/train.py

Failures of the training become the status and reason of the run.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from stepscope.host.environment import granted_cores
from stepscope.run import RunKind, RunStatus
from stepscope.run.status import RunOutcome
from stepscope.session.sampler import Sampler
from stepscope.session.session import Session, traceback_text
from stepscope.store.cuda_readback import keep_for_good
from stepscope.store.recorder import Recorder
from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.train import train
from trainer.training.accelerator import (
    Accelerator,
    CpuAccelerator,
    CudaAccelerator,
    lost_device_reason,
)
from trainer.training.commands import RunStoppedError
from trainer.training.config_validation import TrainDevice, choice_problem
from trainer.training.error_messages import describe_failure
from trainer.training.precision import set_cublas_workspace_config
from trainer.training.rank_info import (
    TrainerRank,
    assigned_devices,
    destroy_process_group,
    init_process_group,
    sampled,
    sampled_by,
)
from trainer.training.state import TrainState


def run(
    config: RunConfig,
    folder: Path,
    *,
    stop: threading.Event | None = None,
    opened: Callable[[Recorder], None] = lambda recorder: None,
    at_boundary: Callable[[TrainState], None] = lambda training: None,
) -> RunStatus:
    """Train into the existing `folder` and return the final status.

    Setting `stop` ends the run at its next step boundary. `opened` receives the recorder, which
    another thread may close after a timeout. `at_boundary` is called between two steps and between
    the batches of a validation, and may raise to end the run without a checkpoint. Exceptions of
    the training become the status and reason of the run. Raises OSError or StoreError if the folder
    cannot be written.

    Each rank calls this, with torchrun's environment variables. Other ranks may wait in a
    collective for a rank that failed: its process must end by os._exit.
    """
    ranks = TrainerRank.of(config, os.environ)
    session = Session(
        folder,
        name=config.workload,
        kind=RunKind.TRAINER,
        config=config.to_dict(),
        rank=ranks.rank,
        ranks=ranks.world_size,
        code=Path(__file__).parent,
    )
    if ranks.world_size > 1:
        session.open_nccl_pipe()
    outcome = RunOutcome(RunStatus.FAILED, "The training process was interrupted.")
    opened(session.recorder)
    try:
        with _cpu_threads(config.num_threads, ranks):
            outcome = _run(config, session, stop or threading.Event(), ranks, at_boundary)
    finally:
        session.close(outcome.status, outcome.reason)
    if outcome.status is RunStatus.FINISHED:
        destroy_process_group()
    return outcome.status


def _run(
    config: RunConfig,
    session: Session,
    stop: threading.Event,
    ranks: TrainerRank,
    at_boundary: Callable[[TrainState], None],
) -> RunOutcome:
    """Find the device, start sampling, connect the ranks, train, and free all memory of the run."""
    device: TrainDevice | None = None
    compute: Accelerator = CpuAccelerator()
    at_failure: Mapping[str, float] = {}
    trace: str | None = None
    outcome = RunOutcome()
    try:
        devices = assigned_devices(config, ranks)
        device = devices[0]
        config = replace(config, device=device.id)
        set_cublas_workspace_config(config)
        if device.cuda_index is not None:
            compute = CudaAccelerator(device.cuda_index)
        compute.reset_peaks()  # a former run of this process has left its peaks
        sampler = _sample(session, devices, ranks)
        init_process_group(config, ranks, compute.device)
        train(
            config,
            session,
            sampler,
            devices=devices,
            compute=compute,
            ranks=ranks,
            stop=stop,
            at_boundary=at_boundary,
        )
    except RunStoppedError as stopped:
        outcome = RunOutcome(RunStatus.STOPPED, str(stopped))
    except Exception as error:  # noqa: BLE001 - becomes the run's reason and an event
        used = [] if device is None else [device]
        lost = lost_device_reason(used[0].cuda_index if used else None)
        outcome = describe_failure(error, config, lost)
        if not isinstance(error, RunFailedError):
            trace = traceback_text(error)
        at_failure = compute.memory()
        if outcome.fatal:
            keep_for_good(error)  # freeing the last pinned batch would abort the process
        else:
            settings = config
            outcome = session.record_memory_failure(
                outcome,
                error,
                lambda field, value: choice_problem(field, value, settings, used) is None,
            )
            _clear_frames(error)
    # After the except block: a live exception holds its frames and so every tensor of the run.
    if not outcome.fatal:
        gc.collect()
        compute.release()
    if outcome.failure is not None:
        session.note_failure(outcome, trace, before=at_failure, after=compute.memory())
    return outcome


def _sample(session: Session, devices: Sequence[TrainDevice], ranks: TrainerRank) -> Sampler:
    """Start sampling before the status becomes running, as the dashboard's layout depends on it."""
    device, source = devices[0], sampled_by(ranks)
    if ranks.distributed:
        local, size = ranks.local_rank, ranks.world_size
        session.recorder.describe(
            rank=ranks.rank, local_rank=local, world_size=size, device=device.id
        )
        if device.cuda_index is not None:  # not every rank samples a GPU
            session.recorder.describe(device_memory=device.memory_total)
    sampler = session.sample(
        source,
        sampled(devices, source),
        trains_on=None if device.cuda_index is None else device.name,
        allocator_index=device.cuda_index,
        host=ranks.local_rank == 0,
    )
    session.oom.attach()
    return sampler


@contextmanager
def _cpu_threads(wanted: int, ranks: TrainerRank) -> Iterator[None]:
    """Set the intra-op threads; by default the ranks of a machine share half the cores."""
    former = torch.get_num_threads()
    torch.set_num_threads(wanted or max(1, granted_cores() // 2 // ranks.local_size))
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables in all frames of the exception and its causes."""
    while True:
        traceback.clear_frames(error.__traceback__)
        if error.__context__ is None:
            return
        error = error.__context__
