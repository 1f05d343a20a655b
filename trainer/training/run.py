"""One run from its configuration to its final status, in whatever thread or process it is called.

run ─> recorder, device, sampler ─> _attempt ─> _train: workload, training, loop
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stepscope.formatting import format_bytes
from stepscope.recording.recorder import Recorder
from stepscope.recording.scalars import keep_for_good
from stepscope.run import RunStatus
from stepscope.sampling.nvml import DeviceSource, open_source
from stepscope.sampling.sampler import Sampler
from trainer.config import RunConfig
from trainer.devices import list_devices
from trainer.environment import environment
from trainer.failures import Failure, RunFailed, explain
from trainer.problems import TrainDevice, problems
from trainer.training.checkpoint import read_checkpoint
from trainer.training.commands import Commands, RunStopped
from trainer.training.compute import Compute, CpuCompute, CudaCompute, why_lost
from trainer.training.data import MemoryLoader, make_loader
from trainer.training.loop import Journal, Loop
from trainer.training.precision import autocast, precision_flags
from trainer.training.state import Training
from trainer.training.step import TrainStep
from trainer.workloads import WORKLOADS

log = logging.getLogger(__name__)

TRACEBACK_FILE = "traceback.txt"
TRACEBACK_LIMIT = 20_000  # characters kept in the event


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `reason` is the sentence shown on the page."""

    status: RunStatus
    reason: str | None = None


def run(
    config: RunConfig,
    folder: Path,
    *,
    stop: threading.Event | None = None,
    opened: Callable[[Recorder], None] = lambda recorder: None,
) -> RunStatus:
    """Train into `folder`, which exists, and return the final status.

    Setting `stop` ends the run at its next step boundary; where that does not come in time,
    another thread may close the recorder, which `opened` is given. Whatever training raises
    becomes the status and reason of the run; only OSError and StoreError of a folder that cannot
    be written leave this function, and what is no Exception (KeyboardInterrupt).
    """
    recorder = Recorder(folder, name=config.workload, config=config.to_dict())
    outcome = Outcome(RunStatus.FAILED, "The training process was interrupted.")
    opened(recorder)
    try:
        outcome = _run(config, recorder, stop or threading.Event())
    finally:
        recorder.close(outcome.status, outcome.reason)
    return outcome.status


def _run(config: RunConfig, recorder: Recorder, stop: threading.Event) -> Outcome:
    """Find the device and sample it for as long as the attempt lasts."""
    device: TrainDevice | None = None
    with _cpu_threads(config.threads):
        try:
            device = _device(config)
            compute = _compute(device)
            compute.reset_peaks()  # in the server's process those of the run before still stand
            sampler = _sampler(device, recorder)
        except Exception as error:  # noqa: BLE001 - becomes the run's reason and an event
            lost = why_lost(device.cuda_index) if device is not None else None
            failure = explain(error, config, device, lost)
            _record_failure(failure, _traceback(error), recorder)
            return Outcome(RunStatus.FAILED, failure.reason)
        try:
            return _attempt(_Attempt(config, recorder, device, compute, sampler, stop))
        finally:
            sampler.stop()


def _sampler(device: TrainDevice, recorder: Recorder) -> Sampler:
    """Describe the device and begin to sample it."""
    source = open_source()
    sampler = Sampler(
        recorder,
        allocator_index=device.cuda_index,
        gpu_uuids=[] if device.cuda_index is None else [device.id],
        source=source,
    )
    driver = next((info.driver_version for info in source.devices()), None)
    # Before the status turns to running: the page lays its charts out by it.
    recorder.describe(environment=environment(device, driver), devices=_sampled(device, source))
    sampler.start()
    return sampler


@dataclass(frozen=True, slots=True)
class _Attempt:
    config: RunConfig
    recorder: Recorder
    device: TrainDevice
    compute: Compute
    sampler: Sampler
    stop: threading.Event


def _attempt(attempt: _Attempt) -> Outcome:
    """Train, turn what happens into an outcome, and leave no memory behind."""
    recorder, compute = attempt.recorder, attempt.compute
    baseline = compute.memory()
    failure: Failure | None = None
    outcome = Outcome(RunStatus.FINISHED)
    try:
        _train(attempt)
    except RunStopped as stopped:
        outcome = Outcome(RunStatus.STOPPED, str(stopped))
    except Exception as error:  # noqa: BLE001 - becomes the run's reason and an event
        lost = why_lost(attempt.device.cuda_index)
        failure = explain(error, attempt.config, attempt.device, lost)
        trace, at_failure = _traceback(error), compute.memory()
        outcome = Outcome(RunStatus.FAILED, failure.reason)
        if failure.fatal:
            keep_for_good(error)  # with its frames, and so the run's page-locked buffers
        else:
            _clear_frames(error)
    # Out of the except block: a live exception holds its frames and so every tensor of the run.
    after = compute.memory() if failure is not None and failure.fatal else _release(compute)
    if failure is not None:
        _record_failure(failure, trace, recorder, before=at_failure, after=after)
    kept = after.get("memory/allocated", 0) - baseline.get("memory/allocated", 0)
    if kept > 0:
        log.warning("%s stay allocated on the GPU after the run", format_bytes(kept))
    return outcome


def _train(attempt: _Attempt) -> None:
    """Build everything in the order that matters (flags, seed, model, optimizer) and train."""
    config, recorder, compute = attempt.config, attempt.recorder, attempt.compute
    with precision_flags(config.precision):
        torch.manual_seed(config.seed)
        task = WORKLOADS[config.workload](config)
        # Channels last: faster convolutions on CPUs, and what tensor cores want.
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        training = Training(config, task.model.to(compute.device), compute)
        parameters = sum(weights.numel() for weights in task.model.parameters())
        recorder.describe(parameters=parameters, **task.run_info)
        if config.resume:
            _resume(training, recorder)
        commands = Commands(
            recorder,
            training,
            stop=attempt.stop,
            readings=attempt.sampler.readings,
            reset_process_peak=attempt.sampler.reset_process_peak,
        )
        recorder.describe(commands=commands.supported_commands())
        with (
            closing(commands),
            closing(make_loader(task.train, config, compute)) as loader,
            closing(MemoryLoader(task.validation, config, compute)) as validation_loader,
        ):
            Loop(
                task=task,
                training=training,
                step=TrainStep(
                    model=training.model,
                    loss=task.loss,
                    optimizer=training.optimizer,
                    scaler=training.scaler,
                    autocast=autocast(config.precision, compute.device),
                    clip_norm=config.clip_norm,
                ),
                loader=loader,
                validation_loader=validation_loader,
                reader=compute.reader(Journal(recorder, config)),
                recorder=recorder,
                commands=commands,
            ).train()


def _resume(training: Training, recorder: Recorder) -> None:
    """Load the checkpoint that the configuration names, from a run beside this one."""
    name = training.config.resume
    state = read_checkpoint(recorder.folder.parent / name)
    training.load(state)
    recorder.step, recorder.epoch = training.step, training.epoch
    taken, changed = training.from_checkpoint(state)
    text = f"Resumed from {name} after step {training.step}, with its {', '.join(taken)}"
    if changed:
        differ = [f"{key} {now} (was {then})" for key, (then, now) in changed.items()]
        text += f"; changed since: {', '.join(differ)}"
    recorder.event("resumed", text, path=name)
    recorder.describe(
        resumed={
            "checkpoint": name,
            "step": training.step,
            "epoch": training.epoch,
            "from_checkpoint": taken,
            "changed": changed,
        },
    )


def _device(config: RunConfig) -> TrainDevice:
    """The device to train on. Raises RunFailed for what `problems` says cannot work."""
    devices = list_devices()
    found = problems(config, devices)
    if found:
        raise RunFailed(str(found[0]))
    return next(device for device in devices if device.id == config.device)


def _compute(device: TrainDevice) -> Compute:
    return CpuCompute() if device.cuda_index is None else CudaCompute(device.cuda_index)


def _sampled(device: TrainDevice, source: DeviceSource) -> list[dict[str, object]]:
    """The GPU whose values are recorded; none on a CPU and without NVML."""
    if device.cuda_index is None or source.reason is not None:
        return []
    totals = {info.uuid: info.memory_total for info in source.devices()}
    # NVML lists no MIG instance among its devices, but reads one by its UUID.
    total = totals.get(device.id, device.memory_total)
    return [{"uuid": device.id, "name": device.name, "memory_total": total}]


@contextmanager
def _cpu_threads(wanted: int) -> Iterator[None]:
    """Set this thread's intra-op threads; half the cores by default, so that the page has some."""
    former = torch.get_num_threads()
    torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // 2))
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _release(compute: Compute) -> dict[str, int]:
    """Free what the run held and return the memory after it."""
    gc.collect()
    compute.release()
    return compute.memory()


def _traceback(error: BaseException) -> str | None:
    """The traceback as text; None where the failure's sentence says it all."""
    return None if isinstance(error, RunFailed) else "".join(traceback.format_exception(error))


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of every frame that the exception and its causes passed."""
    while True:
        traceback.clear_frames(error.__traceback__)
        if error.__context__ is None:
            return
        error = error.__context__


def _record_failure(
    failure: Failure, trace: str | None, recorder: Recorder, **memory: dict[str, int]
) -> None:
    """Mark the failure with the memory before and after, and keep its traceback."""
    data: dict[str, object] = {**memory}
    if trace is not None:
        data["traceback"] = trace[-TRACEBACK_LIMIT:]
        try:
            (recorder.folder / TRACEBACK_FILE).write_text(trace, encoding="utf-8")
        except OSError as error:
            log.warning("the traceback could not be written: %s", error)
    recorder.event(failure.kind, failure.reason, **data)
