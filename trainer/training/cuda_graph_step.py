"""CUDA Graphs: captures the whole optimizer step once and replays it with a single launch.

Captured for full batches: forward, backward, unscale, clip, and the updates of optimizer and loss
scale. Other batches (the last of an epoch) and validation run without a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.store.recorder import Recorder
from trainer.error_messages import RunFailedError
from trainer.training.state import TrainState
from trainer.training.step import OptimizerStep
from trainer.training.warmup import (
    WARMUP_STEPS,
    first_batch,
    preserve_train_state,
    run_optimizer_step,
)
from trainer.workloads.task import Batch, Split


def capture_step(
    step: OptimizerStep, training: TrainState, split: Split, recorder: Recorder
) -> GraphedStep:
    """Capture the step for full batches, and record an event.

    Warms up with a full batch; the training state stays unchanged.

    The optimizer must be capturable or fused. Raises RunFailedError.
    """
    config = training.config
    stream = torch.cuda.Stream(training.compute.device)  # type: ignore[no-untyped-call]
    with preserve_train_state(training):
        batch = first_batch(split, config, training.compute)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                run_optimizer_step(step, batch, config.gradient_accumulation_steps)
        torch.cuda.current_stream().wait_stream(stream)
        try:
            captured = GraphedStep(step, batch, config.gradient_accumulation_steps, stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # ending an invalid capture raises again
                first = first.__context__
            detail = str(first).strip().split("\n")[0].rstrip(".")
            raise RunFailedError(
                f"cuda_graphs: the step cannot be captured ({detail[:300]}). "
                "Switch cuda_graphs off."
            ) from error
    text = f"Step captured for batches of {config.batch_size}"
    if split.length % config.step_size:
        text += "; the smaller last step of each epoch runs without the graph"
    recorder.event("cuda_graphs", f"{text}; so does validation", batch_size=config.batch_size)
    return captured


class _Capture(NamedTuple):
    """A captured micro-batch and its output tensors."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor
    norm: Tensor | None


class GraphedStep:
    """A TrainStep that replays a graph for full batches; it has the interface of TrainStep.

    The next call overwrites the results: copy them on the current stream. Gradients stay allocated
    between steps, as the graph writes into them.
    """

    def __init__(
        self, step: OptimizerStep, batch: Batch, accumulation: int, stream: torch.cuda.Stream
    ) -> None:
        self._step = step
        self._inputs, self._targets = (part.clone() for part in batch)
        self._of = len(self._targets) * accumulation if accumulation > 1 else 0
        self._begun = False  # whether the step has accumulated gradients
        groups = step.optimizer.param_groups
        self._rates = [torch.tensor(float(group["lr"]), device=batch[0].device) for group in groups]
        self._filled = [float(group["lr"]) for group in groups]
        step.optimizer.zero_grad(set_to_none=True)  # the first backward allocates the gradients
        # Graphs by (begun, last): the first micro-batch writes the gradients, later ones add.
        kinds = [(False, False), (True, False), (True, True)]
        if accumulation < 3:
            kinds = [(False, False), (True, True)] if accumulation == 2 else [(False, True)]
        pool = torch.cuda.graph_pool_handle()
        self._captures = {kind: self._capture(kind[1], stream, pool) for kind in kinds}

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a micro-batch; see TrainStep."""
        if of != self._of or inputs.shape != self._inputs.shape:
            return self._without_graph(inputs, targets, of, last)
        capture = self._captures[self._begun, last]
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        for place, group in enumerate(self._step.optimizer.param_groups):
            if group["lr"] != self._filled[place]:  # the scheduler has changed it
                self._filled[place] = float(group["lr"])
                self._rates[place].fill_(self._filled[place])
        capture.graph.replay()
        self._begun = not last
        return capture.loss, capture.norm

    def evaluate(
        self, inputs: Tensor, targets: Tensor, counted: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._step.evaluate(inputs, targets, counted)

    def _without_graph(
        self, inputs: Tensor, targets: Tensor, of: int, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not self._begun:
            self._step.optimizer.zero_grad(set_to_none=False)
        self._begun = not last
        loss = self._step.forward(inputs, targets, of)
        self._step.backward(loss)
        return loss.detach(), self._step.apply() if last else None

    def _capture(self, last: bool, stream: torch.cuda.Stream, pool: Any) -> _Capture:
        graph = torch.cuda.CUDAGraph()
        groups = self._step.optimizer.param_groups
        # Tensors during the capture, as a float would be constant in the graph.
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
        return _Capture(graph, loss.detach(), norm)
