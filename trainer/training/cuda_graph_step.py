"""CUDA Graphs: captures the whole optimizer step once and replays it with a single launch.

Captured for full batches: forward, backward, unscale, clip, and the updates of optimizer and loss
scale. Other batches (the last of an epoch) and validation run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepscope.store.recorder import Recorder
from trainer.errors import RunFailedError
from trainer.training.state import TrainState
from trainer.training.warmup import WARMUP_STEPS, first_batch, preserve_train_state
from trainer.workloads.task import Batch, Split

TrainBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Trains on a batch and keeps the gradients: `TrainStep.train_batch`."""


def capture_step(
    train_batch: TrainBatch, training: TrainState, split: Split, recorder: Recorder
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
                train_batch(*batch)
                training.optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            captured = GraphedStep(train_batch, training.optimizer, batch, stream)
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


class GraphedStep:
    """Replays a graph for full batches; is called like a TrainStep.

    The next call overwrites the results: copy them on the current stream. Gradients stay allocated
    between steps, as the graph writes into them.
    """

    def __init__(
        self,
        train_batch: TrainBatch,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        stream: torch.cuda.Stream,
    ) -> None:
        self._train_batch = train_batch
        self._optimizer = optimizer
        self._inputs, self._targets = (part.clone() for part in batch)
        groups = optimizer.param_groups
        self._rates = [torch.tensor(float(group["lr"]), device=batch[0].device) for group in groups]
        numbers = [float(group["lr"]) for group in groups]
        optimizer.zero_grad(set_to_none=True)  # the backward pass allocates the gradients
        # Tensors during the capture, as a float would be constant in the graph.
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._results = train_batch(self._inputs, self._targets)
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a batch, which is a whole step; see TrainStep."""
        if inputs.shape != self._inputs.shape:
            self._optimizer.zero_grad(set_to_none=False)
            return self._train_batch(inputs, targets)
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()
        return self._results
