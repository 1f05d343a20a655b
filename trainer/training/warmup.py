"""Uncounted steps before training, which leave its state unchanged, to compile and warm up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepscope.common.formatting import format_bytes
from stepscope.store.recorder import Recorder
from trainer.config import CompileMode, RunConfig
from trainer.training.accelerator import Accelerator
from trainer.training.fsdp import local_shard, reshard
from trainer.training.model import translate_compile_errors
from trainer.training.state import TrainState
from trainer.workloads.task import Batch, Split, Task

StepFunction = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor | None]]
"""Trains on a micro-batch: `TrainStep` of trainer/train.py, or its captured graph."""

WARMUP_STEPS = 3  # from torch's CUDA Graphs example; the first step loads most kernels


def run_warmup(
    training: TrainState,
    step: StepFunction,
    evaluate: Callable[[Tensor, Tensor], object],
    task: Task,
    recorder: Recorder,
) -> None:
    """Compile, warm up and reserve memory as configured, with events. Raises RunFailedError."""
    config = training.config
    compiles = config.compile_mode is not CompileMode.NONE
    if not (compiles or config.kernel_warmup or config.preallocate_memory):
        return
    with preserve_train_state(training):
        if compiles:
            _compile(training, step, task, recorder)
        if config.kernel_warmup:
            batch = first_batch(task.train, config, training.compute)
            seconds = _repeat(training, step, batch, WARMUP_STEPS)
            text = f"Kernel warm-up: {WARMUP_STEPS} steps in {seconds:.2f} s"
            event = f"{text}, training state unchanged"
            recorder.event("warmup", event, seconds=seconds, steps=WARMUP_STEPS)
        if config.preallocate_memory:
            _reserve(training, step, evaluate, task, recorder)


def full_batch_size(split: Split, config: RunConfig) -> int:
    """Return the number of samples in the largest batch of a split in one process."""
    return min(config.batch_size, -(-split.length // config.world_size))


def first_batch(split: Split, config: RunConfig, compute: Accelerator) -> Batch:
    """Return a full batch of the first samples of a split on the device."""
    inputs, targets = split.take(torch.arange(full_batch_size(split, config)))
    return inputs.to(compute.device), targets.to(compute.device)


def run_optimizer_step(step: StepFunction, batch: Batch, accumulation: int) -> None:
    """Take an optimizer step whose micro-batches are all `batch`."""
    of = len(batch[1]) * accumulation
    for number in range(1, accumulation + 1):
        step(*batch, of, number == accumulation)


@contextmanager
def preserve_train_state(training: TrainState) -> Iterator[None]:
    """Restore weights, buffers, optimizer state, loss scale and RNG state at the end.

    Copies are in host memory, as a second model may not fit on the GPU; tensors are restored in
    place for CUDA graphs. New optimizer state becomes zeros, with which Adam and momentum start.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    tensors = [local_shard(tensor) for tensor in (*model.parameters(), *model.buffers())]
    copies = [_on_host(tensor) for tensor in tensors]
    states = {
        weights: {
            name: _on_host(local_shard(value))
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        for weights, state in optimizer.state.items()
    }
    scale = scaler.state_dict()
    index = training.compute.device.index
    with torch.random.fork_rng([] if index is None else [index]):
        yield
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        for weights, state in optimizer.state.items():
            former = states.get(weights, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    part = local_shard(value)
                    part.copy_(former[name]) if name in former else part.zero_()
    scaler.load_state_dict(scale)


def _compile(training: TrainState, step: StepFunction, task: Task, recorder: Recorder) -> None:
    """Compile for a full batch, so that no counted step includes the compilation."""
    config = training.config
    batch = first_batch(task.train, config, training.compute)
    mode = config.compile_mode
    text = f"Compiling the model (torch.compile, {mode}); training starts when it is done"
    recorder.event("compile", text, mode=str(mode))
    with translate_compile_errors(config):
        seconds = _repeat(training, step, batch, 1)
    recorder.event("compile", f"Compiled in {seconds:.1f} s", mode=str(mode), seconds=seconds)


def _reserve(
    training: TrainState,
    step: StepFunction,
    evaluate: Callable[[Tensor, Tensor], object],
    task: Task,
    recorder: Recorder,
) -> None:
    """Run the largest step and validation batch once, whose memory stays reserved."""
    config, compute = training.config, training.compute
    before = compute.memory()
    seconds = _repeat(training, step, first_batch(task.train, config, compute), 1)
    training.model.eval()
    with torch.no_grad():
        evaluate(*first_batch(task.validation, config, compute))
    training.model.train()
    reshard(training.model)
    after = compute.memory()
    reserved = [format_bytes(memory["memory/reserved"]) for memory in (after, before)]
    text = f"Preallocated memory: {reserved[0]} reserved, {reserved[1]} before"
    recorder.event("memory_warmup", text, seconds=seconds, before=before, after=after)


def _repeat(training: TrainState, step: StepFunction, batch: Batch, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        run_optimizer_step(step, batch, training.config.gradient_accumulation_steps)
    training.compute.synchronize()
    return time.perf_counter() - began


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
