"""Fake tensors, which have no values. Patches torch, so the process must be dedicated."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.workloads import WORKLOADS
from trainer.workloads.task import Task

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 2**20
"""Larger tensors of a model get no memory, even before they become parameters."""
MAX_FLASH_HEAD = 256
MIN_FLASH_CAPABILITY = (8, 0)
_FACTORIES = ("empty", "zeros", "ones", "rand", "randn", "full")


@contextmanager
def as_on(device: torch.device) -> Iterator[None]:
    """Make torch accept fake tensors of a device, with or without a GPU."""
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "_apply", _Apply()))
        # A context on the GPU would take memory there.
        stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
        if not torch.cuda.is_available():
            common = torch.cuda.amp.common
            stack.enter_context(replaced(common, "amp_definitely_not_available", lambda: False))
            stack.enter_context(replaced(torch.cuda, "is_bf16_supported", lambda *_: True))
        if device.type == "cuda":
            # A device that does not exist has no thread for the backward pass.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


class _Apply:
    """`Module._apply` that replaces tensors, as torch cannot change fake ones in place.

    New tensors are stored by the ids of function and old parameter, so shared ones stay shared.
    """

    def __init__(self) -> None:
        self._new: dict[tuple[int, int], tuple[object, Tensor, Tensor]] = {}

    def __get__(self, module: nn.Module, kind: type[nn.Module]) -> Any:
        return functools.partial(self._apply, module)

    def _apply(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, given in module._parameters.items():
            if given is not None:
                module._parameters[name] = self._changed(given, fn)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    def _changed(self, given: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        key = id(fn), id(given)
        if key not in self._new:
            with torch.no_grad():
                changed = fn(given)
            new = given if changed is given else nn.Parameter(changed, given.requires_grad)
            self._new[key] = fn, given, new
        return self._new[key][2]


def fake_task(config: RunConfig, mode: FakeTensorMode, device: torch.device) -> Task:
    """Return the workload, with its model on fake tensors unless its code reads weights."""
    try:
        with _without_memory(mode, device):
            task = WORKLOADS[config.workload](config)
    except (RunFailedError, OSError, MemoryError):
        raise  # of the data
    except Exception as error:  # noqa: BLE001 - a model's own code may need values
        log.info("the model is built with real tensors: %s", error)
        task = WORKLOADS[config.workload](config)
    tensors = [*task.model.parameters(), *task.model.buffers()]
    if all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return task
    # deepcopy takes these for objects that it has copied already; shared tensors stay shared.
    copies: dict[int, Any] = {id(tensor): _fake(tensor, mode, device) for tensor in tensors}
    return replace(task, model=copy.deepcopy(task.model, copies))


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextmanager
def _without_memory(mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Replace parameters and buffers by fake ones when a module registers them."""

    def register(module: nn.Module, name: str, given: Tensor | None) -> Any:
        if given is None or isinstance(given, FakeTensor) and given.device == device:
            return None
        return _fake(given, mode, device)

    hooks = (
        register_module_parameter_registration_hook(register),
        register_module_buffer_registration_hook(register),
    )
    try:
        with _LargeIsFake(mode):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _LargeIsFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes large new tensors fake."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in _FACTORIES:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if math.prod(args[0]) * dtype.itemsize > LARGE_BYTES:
                with self._mode:
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def attention_on(capability: tuple[int, int]) -> Iterator[None]:
    """Select the attention kernel of a GPU of this compute capability, in recomputed blocks too.

    The order is flash, memory-efficient, math, as in aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp (torch 2.13). A mask excludes flash; a head size that is no multiple of 8 needs
    math. A dispatch mode would not cover the backward pass.
    """
    attend = functools.partial(_attend, functional.scaled_dot_product_attention, capability)
    with replaced(functional, "scaled_dot_product_attention", attend):
        yield


def _attend(
    func: Callable[..., Tensor],
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (part.to(dtype) for part in (query, key, value))
    head, scale = query.shape[-1], more.get("scale")
    fused = head % 8 == 0 and attn_mask is None and not more.get("enable_gqa")
    half = query.dtype in (torch.float16, torch.bfloat16)
    aten, found = torch.ops.aten, None
    if fused and half and head <= MAX_FLASH_HEAD and capability >= MIN_FLASH_CAPABILITY:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
    elif fused and query.dtype is not torch.float64:
        needs = any(part.requires_grad for part in (query, key, value))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, needs, dropout_p, is_causal, scale=scale
        )
    if found is None:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    output: Tensor = found[0]
    return output
