"""torch.compile around the model of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import CompileMode, RunConfig
from trainer.error_messages import RunFailedError

_THREADS_SINCE = (2, 13)
"""Before, CUDA graphs of torch.compile failed in threads that Python made (pytorch#123177)."""
_WITH_GRAPHS = (CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE)


@contextmanager
def compiled(
    model: nn.Module, config: RunConfig, device: torch.device, full: int
) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """Yield the forward pass with torch.compile for batches of `full` samples; None without it.

    Other batches, such as the last of an epoch, run the model uncompiled: after a second batch size
    Dynamo would replace the static graph with a dynamic one for all sizes. The model and the names
    of its weights do not change. The caches of the compiler are cleared at the end. Raises
    RunFailedError.
    """
    if config.compile_mode is CompileMode.NONE:
        yield None
        return
    with_graphs = config.compile_mode in _WITH_GRAPHS and device.type == "cuda"
    if with_graphs:
        _refuse_thread(config)
    made = torch.compile(model, mode=config.compile_mode.value)

    def forward(inputs: Tensor) -> Tensor:
        if with_graphs:  # what the last step gave may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        outputs: Tensor = (made if len(inputs) == full else model)(inputs)
        return outputs

    try:
        yield forward
    finally:
        torch.compiler.reset()


@contextmanager
def translate_compile_errors(config: RunConfig) -> Iterator[None]:
    """Raise RunFailedError for errors of the compiler. Others, such as out of memory, propagate.

    The traceback is that of the compiler and helps nobody who did not write it.
    """
    try:
        yield
    except Exception as error:
        # By name: importing torch's compiler takes seconds, which a run without it need not pay.
        if "TorchDynamoException" not in (kind.__name__ for kind in type(error).__mro__):
            raise
        raise RunFailedError(
            f"compile_mode: torch.compile ({config.compile_mode}) could not compile this model: "
            f"{_what(error)}. Set compile_mode to none."
        ) from error


def _refuse_thread(config: RunConfig) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _THREADS_SINCE and threading.current_thread() is not threading.main_thread():
        raise RunFailedError(
            f"compile_mode: {config.compile_mode} uses CUDA Graphs, which torch "
            f"{torch.__version__} can compile in the main thread only. Choose the process runner."
        )


def _what(error: BaseException) -> str:
    """Return what the compiler says: a failure of its backend carries the true one."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return (
        f"{type(inner).__name__}: {lines[0].rstrip('.:')[:300]}" if lines else type(inner).__name__
    )
