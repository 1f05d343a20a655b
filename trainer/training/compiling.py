"""torch.compile around the model of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import CompileMode, RunConfig
from trainer.error_messages import RunFailedError

_THREADS_SINCE = (2, 13)  # before, CUDA graphs of torch.compile failed in threads (pytorch#123177)
_WITH_GRAPHS = (CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE)


@contextmanager
def compiled(
    model: nn.Module, config: RunConfig, device: torch.device, full: int
) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """Yield the compiled forward pass for batches of `full` samples; None without torch.compile.

    Other batches, such as the last of an epoch, run uncompiled: for a second batch size Dynamo
    would recompile with dynamic shapes. Raises RunFailedError.
    """
    if config.compile_mode is CompileMode.NONE:
        yield None
        return
    with_graphs = config.compile_mode in _WITH_GRAPHS and device.type == "cuda"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    in_thread = threading.current_thread() is not threading.main_thread()
    if with_graphs and in_thread and version < _THREADS_SINCE:
        raise RunFailedError(
            f"compile_mode: {config.compile_mode} uses CUDA Graphs, which torch "
            f"{torch.__version__} can compile in the main thread only. Choose the process runner."
        )
    compiled_model = torch.compile(model, mode=config.compile_mode.value)

    def forward(inputs: Tensor) -> Tensor:
        if with_graphs:  # outputs of the last step may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        outputs: Tensor = (compiled_model if len(inputs) == full else model)(inputs)
        return outputs

    try:
        yield forward
    finally:
        torch.compiler.reset()


@contextmanager
def translate_compile_errors(config: RunConfig) -> Iterator[None]:
    """Raise RunFailedError without a traceback for compiler errors; others propagate."""
    try:
        yield
    except Exception as error:
        # By name: importing torch's compiler takes seconds.
        if "TorchDynamoException" not in (kind.__name__ for kind in type(error).__mro__):
            raise
        cause = getattr(error, "inner_exception", error)  # of the backend
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        detail = f": {lines[0].rstrip('.:')[:300]}" if lines else ""
        raise RunFailedError(
            f"compile_mode: torch.compile ({config.compile_mode}) could not compile this model: "
            f"{type(cause).__name__}{detail}. Set compile_mode to none."
        ) from error
