"""CUDA Graphs: the whole step is recorded once and then replayed with one launch.

Recorded are forward, backward, unscale, clip, the optimizer's update and that of the loss scale,
for batches of the full size. Other batches (the last of an epoch) take the same weights, gradients
and optimizer state without the graph, and so does validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.error_messages import RunFailedError
from trainer.training.activation_checkpointing import detect_rng_usage
from trainer.training.state import TrainState
from trainer.training.step import TrainStep
from trainer.training.warmup import (
    WARMUP_STEPS,
    first_batch,
    full_batch_size,
    preserve_train_state,
    run_optimizer_step,
)
from trainer.workloads.task import Batch, Split


def capture_step(step: TrainStep, training: TrainState, split: Split) -> GraphedStep:
    """Warm up with a batch of the full size, then capture the step; neither changes the training.

    The optimizer must be capturable or fused. Raises RunFailedError for a step that cannot be
    captured, and where the split leaves out so many samples that no batch is full.
    """
    stream = torch.cuda.Stream(training.compute.device)  # type: ignore[no-untyped-call]
    with preserve_train_state(training):
        batch = _full_batch(split, training)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with detect_rng_usage(training.compute.rng_state) as draws:
                for _ in range(WARMUP_STEPS):
                    run_optimizer_step(step, batch, training.config.gradient_accumulation_steps)
            if draws.seen:
                raise RunFailedError(
                    "cuda_graphs: this model uses dropout, which would draw different random "
                    "numbers when recomputed inside a graph. Turn off activation_checkpointing "
                    "or cuda_graphs."
                )
        torch.cuda.current_stream().wait_stream(stream)
        try:
            return GraphedStep(step, batch, training.config.gradient_accumulation_steps, stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # also of a capture that an illegal call has ended
            first: BaseException = error
            while first.__context__ is not None:  # the end of a broken capture raises as well
                first = first.__context__
            detail = str(first).strip().split("\n")[0].rstrip(".")
            raise RunFailedError(
                f"cuda_graphs: the step cannot be captured ({detail[:300]}). "
                "Switch cuda_graphs off."
            ) from error


def _full_batch(split: Split, training: TrainState) -> Batch:
    config = training.config
    batch = first_batch(split, config, training.compute)
    found, size = len(batch[1]), full_batch_size(split, config)
    if found < size:
        raise RunFailedError(
            f"cuda_graphs: the step is captured for batches of {size:,}, but only {found:,} of "
            f"{split.length:,} samples could be loaded. Reduce batch_size or turn off "
            "cuda_graphs."
        )
    return batch


@dataclass(frozen=True, slots=True)
class _Recording:
    """A captured part of a step and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor
    norm: Tensor | None


class GraphedStep:
    """A TrainStep whose full batches are replayed; called in the same way.

    The results of a call are overwritten by the next one: copy them on the current stream.
    Gradients stay allocated between steps, where the graph writes them.
    """

    def __init__(
        self, step: TrainStep, batch: Batch, accumulation: int, stream: torch.cuda.Stream
    ) -> None:
        self._step = step
        self._inputs, self._targets = (part.clone() for part in batch)
        self._of = len(self._targets) * accumulation if accumulation > 1 else 0
        self._begun = False  # some batches of this step have given their gradients
        groups = step.optimizer.param_groups
        self._rates = [torch.tensor(float(group["lr"]), device=batch[0].device) for group in groups]
        self._filled = [float(group["lr"]) for group in groups]
        step.optimizer.zero_grad(set_to_none=True)  # so that the first backward makes them anew
        # The first batch of a step writes the gradients, those after it add to them: by whether the
        # step has begun, and whether the batch is its last.
        kinds = [(False, False), (True, False), (True, True)]
        if accumulation < 3:
            kinds = [(False, False), (True, True)] if accumulation == 2 else [(False, True)]
        pool = torch.cuda.graph_pool_handle()
        self._recordings = {kind: self._record(kind[1], stream, pool) for kind in kinds}

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a batch, as TrainStep does."""
        recording = self._recordings.get((self._begun, last))
        # None where batches of this step had no samples: a first one is the last, for example.
        if recording is None or of != self._of or inputs.shape != self._inputs.shape:
            return self._without_graph(inputs, targets, of, last)
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._fill_rates()
        recording.graph.replay()
        self._begun = not last
        return recording.loss, recording.norm

    def update(self, factor: float = 1.0) -> Tensor | None:
        """Update the weights with the gradients that are there, as TrainStep does."""
        self._begun = False
        return self._step.apply(factor)

    def evaluate(
        self, inputs: Tensor, targets: Tensor, counted: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what TrainStep does, without a graph."""
        return self._step.evaluate(inputs, targets, counted)

    def _without_graph(
        self, inputs: Tensor, targets: Tensor, of: int, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not self._begun:
            self._step.optimizer.zero_grad(set_to_none=False)
        self._begun = True
        loss = self._step.forward(inputs, targets, of)
        self._step.backward(loss)
        return loss.detach(), self.update() if last else None

    def _record(self, last: bool, stream: torch.cuda.Stream, pool: Any) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        groups = self._step.optimizer.param_groups
        # The schedule goes on with plain numbers; one of these would become part of the graph.
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                loss = self._step.forward(self._inputs, self._targets, self._of)
                self._step.backward(loss)
                norm = self._step.apply() if last else None
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        return _Recording(graph, loss.detach(), norm)

    def _fill_rates(self) -> None:
        """Bring learning rates that the schedule has moved to where the graph reads them."""
        for place, group in enumerate(self._step.optimizer.param_groups):
            if group["lr"] != self._filled[place]:
                self._filled[place] = float(group["lr"])
                self._rates[place].fill_(self._filled[place])
