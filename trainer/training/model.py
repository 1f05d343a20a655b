"""Prepares the model: dtype, memory format, device; DataParallel, DDP or FSDP2; torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import CompileMode, RunConfig, Strategy
from trainer.errors import RunFailedError
from trainer.training.activation_checkpointing import apply_activation_checkpointing
from trainer.training.config_validation import TrainDevice
from trainer.training.fsdp import apply_fsdp, unreduced
from trainer.training.precision import param_dtype
from trainer.training.rank_info import TrainerRank

_WITH_GRAPHS = (CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE)


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Converts the inputs of a batch, on the device."""

    dtype: torch.dtype | None = None  # of floating inputs; integers stay
    channels_last: bool = False  # of images (4-d)

    @classmethod
    def of(cls, config: RunConfig) -> InputFormat:
        return cls(param_dtype(config.precision), config.channels_last)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the inputs in this format, without a copy if possible."""
        if self.dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs


def prepare(
    model: nn.Module, config: RunConfig, device: torch.device, ranks: TrainerRank | None = None
) -> nn.Module:
    """Prepare the model in place, before its optimizer: format, dtype, and device or shards."""
    fsdp = config.strategy is Strategy.FSDP and ranks is not None
    if config.activation_checkpointing:
        apply_activation_checkpointing(model)
    # FSDP needs contiguous weights; for a convolution channels_last images are enough.
    if config.channels_last and not fsdp:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dtype = param_dtype(config.precision)
    if dtype is not None:
        model.to(dtype)
        for part in model.modules():
            if isinstance(part, _BatchNorm):
                part.float()  # its sums over the batch need 32 bits; its outputs have 16
    if not fsdp or ranks is None:
        return model.to(device)
    apply_fsdp(model, config, ranks, device)
    return model


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The model for training, with a wrapper for several devices, and its no_sync context."""

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext

    @classmethod
    def of(
        cls, model: nn.Module, config: RunConfig, devices: Sequence[TrainDevice]
    ) -> ParallelModel:
        """Wrap a model on the first device. With DDP all ranks must call it: rank 0 broadcasts."""
        if config.strategy is Strategy.DP:
            return cls(DataParallel(model, [device.cuda_index or 0 for device in devices]))
        if config.strategy is Strategy.DDP:
            index = devices[0].cuda_index
            ddp = DistributedDataParallel(model, None if index is None else [index])
            return cls(ddp, ddp.no_sync)
        if config.strategy is Strategy.FSDP:
            return cls(model, partial(unreduced, model))
        return cls(model)


@contextmanager
def compiled(
    model: nn.Module, config: RunConfig, device: torch.device, full: int
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the compiled forward pass for batches of `full` samples, or the model if not compiled.

    Other batches, such as the last of an epoch, run uncompiled: for a second batch size Dynamo
    would recompile with dynamic shapes.
    """
    if config.compile_mode is CompileMode.NONE:
        yield model
        return
    with_graphs = config.compile_mode in _WITH_GRAPHS and device.type == "cuda"
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
