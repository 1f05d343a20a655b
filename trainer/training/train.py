"""A run from its configuration to its final status, in the calling thread.

run ─> session, device, sampler ─> _attempt ─> _train: model, strategy, compile, loaders, loop
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from stepscope.common.stack_phases import INPUT
from stepscope.host.environment import granted_cores
from stepscope.recorder.cuda_readback import keep_for_good
from stepscope.recorder.recorder import Recorder
from stepscope.run import RUN_JSON, RunKind, RunStatus
from stepscope.run.status import RunOutcome
from stepscope.session.session import Session, traceback_text
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice, choice_problem, epoch_problem
from trainer.error_messages import RunFailedError, describe_failure
from trainer.training.accelerator import (
    Accelerator,
    CpuAccelerator,
    CudaAccelerator,
    lost_device_reason,
)
from trainer.training.checkpoint import read_on_first_rank
from trainer.training.cuda_graph_step import GraphedStep, capture_step
from trainer.training.flops import FlopsMeter
from trainer.training.fsdp import weights_on_first_rank
from trainer.training.loaders import make_loader
from trainer.training.loop import RunStoppedError, TrainerCommands, TrainLoop, log_step
from trainer.training.model import ParallelModel, compiled, prepare
from trainer.training.precision import run_flags, set_cublas_workspace_config
from trainer.training.rank_info import (
    TrainerRank,
    assigned_devices,
    destroy_process_group,
    init_process_group,
    sampled,
    sampled_by,
)
from trainer.training.state import TrainState
from trainer.training.step import TrainPhaseTimer, TrainStep, build_train_step
from trainer.training.warmup import full_batch_size, run_warmup
from trainer.workloads import WORKLOADS
from trainer.workloads.task import Task, TensorSplit

DATA_FILES = {f"trainer/training/{name}.py": INPUT for name in ("loaders", "worker_pool")}
"""Files whose failed allocations belong to the input phase."""
FIRST_RANK_S = 30.0  # timeout for rank 0 to start: importing torch takes seconds
POLL_S = 0.05


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
    _wait_for_first_rank(folder, ranks)
    if outcome.status is RunStatus.FINISHED:
        destroy_process_group()
    return outcome.status


def _wait_for_first_rank(folder: Path, ranks: TrainerRank) -> None:
    """Wait for the run.json of rank 0, which torchrun kills when this rank ends early."""
    if not ranks.rank or dist.is_initialized():  # connected ranks: rank 0 has written it
        return
    deadline = time.monotonic() + FIRST_RANK_S
    while not os.path.exists(folder / RUN_JSON) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _run(
    config: RunConfig,
    session: Session,
    stop: threading.Event,
    ranks: TrainerRank,
    at_boundary: Callable[[TrainState], None],
) -> RunOutcome:
    """Find the device, start sampling, connect the ranks, and train."""
    device: TrainDevice | None = None
    try:
        devices = assigned_devices(config, ranks)
        device = devices[0]
        config = replace(config, device=device.id)
        set_cublas_workspace_config(config)
        index = device.cuda_index
        compute = CpuAccelerator() if index is None else CudaAccelerator(index)
        compute.reset_peaks()  # a former run of this process has left its peaks
        _sample(session, devices, ranks)
        init_process_group(config, ranks, compute.device)
    except Exception as error:  # noqa: BLE001 - becomes the run's reason and an event
        outcome = describe_failure(
            error, config, device, lost_device_reason(device.cuda_index if device else None)
        )
        session.note_failure(outcome, _traceback(error))
        return outcome
    return _attempt(_RunContext(config, session, devices, compute, stop, ranks, at_boundary))


def _sample(session: Session, devices: Sequence[TrainDevice], ranks: TrainerRank) -> None:
    """Start sampling before the status becomes running, as the dashboard's layout depends on it."""
    device, source = devices[0], sampled_by(ranks)
    if ranks.several:
        local, size = ranks.local_rank, ranks.world_size
        session.recorder.describe(
            rank=ranks.rank, local_rank=local, world_size=size, device=device.id
        )
        if device.cuda_index is not None:  # not every rank samples a GPU
            session.recorder.describe(device_memory=device.memory_total)
    session.sample(
        source,
        sampled(devices, source),
        trains_on=None if device.cuda_index is None else device.name,
        allocator_index=device.cuda_index,
        host=ranks.local_rank == 0,
    )
    session.oom.own_parts = DATA_FILES
    session.oom.attach()


@dataclass(frozen=True, slots=True)
class _RunContext:
    config: RunConfig
    session: Session
    devices: Sequence[TrainDevice]
    compute: Accelerator
    stop: threading.Event
    ranks: TrainerRank
    at_boundary: Callable[[TrainState], None]

    @property
    def device(self) -> TrainDevice:
        """The device of this process; DataParallel uses more."""
        return self.devices[0]


def _attempt(attempt: _RunContext) -> RunOutcome:
    """Train, return the outcome, and free all memory of the run."""
    compute = attempt.compute
    at_failure: Mapping[str, float] = {}
    trace: str | None = None
    outcome = RunOutcome()
    try:
        _train(attempt)
    except RunStoppedError as stopped:
        outcome = RunOutcome(RunStatus.STOPPED, str(stopped))
    except Exception as error:  # noqa: BLE001 - becomes the run's reason and an event
        lost = lost_device_reason(attempt.device.cuda_index)
        outcome = describe_failure(error, attempt.config, attempt.device, lost)
        if not outcome.fatal:
            outcome = attempt.session.told_case(
                outcome,
                error,
                lambda field, value: (
                    choice_problem(field, value, attempt.config, [attempt.device]) is None
                ),
            )
        trace, at_failure = _traceback(error), compute.memory()
        if outcome.fatal:
            keep_for_good(error)  # freeing the last pinned batch would abort the process
        else:
            _clear_frames(error)
    # After the except block: a live exception holds its frames and so every tensor of the run.
    if not outcome.fatal:
        gc.collect()
        compute.release()
    if outcome.failure is not None:
        after = compute.memory()
        attempt.session.note_failure(outcome, trace, before=at_failure, after=after)
    return outcome


def _train(attempt: _RunContext) -> None:
    """Build everything that a run needs, in execution order, and train."""
    config, compute, ranks = attempt.config, attempt.compute, attempt.ranks
    session, recorder = attempt.session, attempt.session.recorder
    with ExitStack() as stack:
        stack.enter_context(run_flags(config))

        # The model, with initial weights from the seed.
        torch.manual_seed(config.seed)
        with weights_on_first_rank(config, ranks):
            task = WORKLOADS[config.workload](config)
        if too_short := epoch_problem(config, task.train.length):
            raise RunFailedError(str(too_short))
        speed = FlopsMeter.of(task, config, attempt.device)
        model = prepare(task.model, config, compute.device, ranks)

        # Optimizer, learning rate and gradient scaler, from the checkpoint if there is one.
        training = TrainState(config, model, compute, ranks, task.train.length)
        _describe(attempt, task, training, speed)
        if config.resume_from:
            _resume(training, recorder)
        _count_steps(session, training)

        # DataParallel or DDP around the model, then torch.compile around both.
        parallel = ParallelModel.of(model, config, attempt.devices)
        phases = TrainPhaseTimer(parallel.model) if ranks.several else None
        ranks.begin_random(config.seed, training.step)
        full = full_batch_size(task.train, config)
        forward = stack.enter_context(compiled(parallel.model, config, compute.device, full))

        # Commands of the dashboard, then the data loaders.
        handlers = TrainerCommands(recorder, training, attempt.stop, attempt.at_boundary)
        commands = session.answer(
            handlers.handlers, check=handlers.check, step=session.oom.step, closed_here=True
        )
        stack.enter_context(closing(commands))
        loading = ranks.seeded(config)
        loader = stack.enter_context(closing(make_loader(task.train, loading, compute)))
        validation_loader = make_loader(task.validation, loading, compute, validation=True)
        stack.enter_context(closing(validation_loader))

        # The optimizer step, its warm-up or CUDA Graphs, and the loop.
        step = build_train_step(training, task, parallel, forward, phases)
        run_warmup(training, step, task, recorder)
        TrainLoop(
            task=task,
            training=training,
            step=_captured(step, training, task, recorder) if config.cuda_graphs else step,
            loader=loader,
            validation_loader=validation_loader,
            reader=compute.reader(partial(log_step, recorder, config)),
            recorder=recorder,
            commands=commands,
            speed=speed,
            phases=phases,
        ).train()


def _describe(attempt: _RunContext, task: Task, training: TrainState, speed: FlopsMeter) -> None:
    """Record properties of the model in run.json and in the memory breakdown."""
    parts = attempt.session.sampler.readings.parts
    parts.add_model(training.model)
    parts.add_optimizer(training.optimizer)
    attempt.session.recorder.describe(
        parameters=sum(weights.numel() for weights in task.model.parameters()),
        compute_capability=attempt.device.compute_capability,
        data_in_memory=isinstance(task.train, TensorSplit),
        **speed.facts(training.config.step_size),
        **task.run_info,
    )


def _count_steps(session: Session, training: TrainState) -> None:
    """Provide the current step for failed allocations, as recorded rows arrive later."""
    reference = weakref.ref(training)  # the session outlives the model
    session.oom.first_step = training.step
    session.oom.step = lambda: session.recorder.step if (now := reference()) is None else now.step


def _captured(step: TrainStep, training: TrainState, task: Task, recorder: Recorder) -> GraphedStep:
    """Capture the step as CUDA graphs and record an event."""
    config = training.config
    captured = capture_step(step, training, task.train)
    text = f"Step captured for batches of {config.batch_size}"
    if task.train.length % config.step_size:
        text += "; the smaller last step of each epoch runs without the graph"
    recorder.event("cuda_graphs", f"{text}; so does validation", batch_size=config.batch_size)
    return captured


def _resume(training: TrainState, recorder: Recorder) -> None:
    """Load the checkpoint `resume_from` of a run in the same root folder."""
    name = training.config.resume_from
    state = read_on_first_rank(recorder.folder.parent / name, training.ranks)
    training.load(state)
    recorder.step, recorder.epoch = training.step, training.epoch
    changed = training.changed_settings(state)
    text = f"Resumed from {name} after step {training.step}"
    if changed:
        differ = [f"{key} {now} (was {then})" for key, (then, now) in changed.items()]
        text += f"; changed since: {', '.join(differ)}"
    recorder.event("resumed", text, path=name)
    position = {"checkpoint": name, "step": training.step, "epoch": training.epoch}
    recorder.describe(resumed=position | {"changed": changed})


@contextmanager
def _cpu_threads(wanted: int, ranks: TrainerRank) -> Iterator[None]:
    """Set the intra-op threads; by default the ranks of a machine share half the cores."""
    former = torch.get_num_threads()
    torch.set_num_threads(wanted or max(1, granted_cores() // 2 // ranks.local_size))
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _traceback(error: BaseException) -> str | None:
    """Return the traceback as text; None for an expected failure."""
    return None if isinstance(error, RunFailedError) else traceback_text(error)


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables in all frames of the exception and its causes."""
    while True:
        traceback.clear_frames(error.__traceback__)
        if error.__context__ is None:
            return
        error = error.__context__
