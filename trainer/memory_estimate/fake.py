"""The world in which a step is played: tensors with a size and no values, with or without a GPU.

Only for a process of its own: parts of torch are replaced while it lasts.
"""

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
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import RunConfig
from trainer.error_messages import RunFailed
from trainer.workloads import WORKLOADS
from trainer.workloads.task import Task

log = logging.getLogger(__name__)

LARGE = 64 * 2**20
"""Bytes from which a tensor that a model is made of gets no memory, not even before it becomes a
parameter."""
_FACTORIES = ("empty", "zeros", "ones", "rand", "randn", "full")


def fake_mode() -> FakeTensorMode:
    """Return a mode in which data of the real world may be used."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def as_on(device: torch.device) -> Iterator[None]:
    """Let torch take fake tensors of a device for real ones, with or without a GPU."""
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "_apply", _Applied()))
        # A context on the GPU would take memory there.
        stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
        if not torch.cuda.is_available():
            common = torch.cuda.amp.common
            stack.enter_context(replaced(common, "amp_definitely_not_available", lambda: False))
            stack.enter_context(replaced(torch.cuda, "is_bf16_supported", lambda *_: True))
        if device.type == "cuda":
            # The backward pass in this thread: there is none for a device that does not exist.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put a value in the place of an attribute for a time."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


class _Applied:
    """`Module._apply` for fake tensors, which torch cannot change in place: new ones are put in.

    Parameters that modules share stay shared.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[object, Tensor, Tensor]] = {}
        """The new parameter by change and old one, which are kept: their ids must stay theirs."""

    def __get__(self, module: nn.Module, kind: type[nn.Module]) -> Any:
        return functools.partial(self._apply, module)

    def _apply(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, given in module._parameters.items():
            if given is not None:
                module._parameters[name] = self._new(given, fn)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    def _new(self, given: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        key = id(fn), id(given)
        if key not in self._made:
            with torch.no_grad():
                changed = fn(given)
            new = given if changed is given else nn.Parameter(changed, given.requires_grad)
            self._made[key] = fn, given, new
        return self._made[key][2]


def fake_task(config: RunConfig, mode: FakeTensorMode, device: torch.device) -> Task:
    """Return the workload with its data, and a model of fake tensors on the device.

    The model takes no memory, whatever its size, unless its code reads values of its weights.
    """
    try:
        with _without_memory(mode, device):
            task = WORKLOADS[config.workload](config)
    except (RunFailed, OSError, MemoryError):
        raise  # of the data
    except Exception as error:  # noqa: BLE001 - a model's own code may need values
        log.info("the model is built for real: %s", error)
        task = WORKLOADS[config.workload](config)
    if all(isinstance(tensor, FakeTensor) for tensor in _tensors(task.model)):
        return task
    return replace(task, model=_copied(task.model, mode, device))


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a fake tensor of this form; call it outside of `mode`."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _without_memory(mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Have parameters and buffers of modules become fake ones when they are registered."""

    def parameter(module: nn.Module, name: str, given: Tensor | None) -> Tensor | None:
        if given is None or isinstance(given, FakeTensor) and given.device == device:
            return None
        return nn.Parameter(fake_like(given, mode, device), requires_grad=given.requires_grad)

    def buffer(module: nn.Module, name: str, given: Tensor | None) -> Tensor | None:
        if given is None or isinstance(given, FakeTensor) and given.device == device:
            return None
        return fake_like(given, mode, device)

    hooks = (
        register_module_parameter_registration_hook(parameter),  # type: ignore[arg-type]
        register_module_buffer_registration_hook(buffer),  # type: ignore[arg-type]
    )
    try:
        with _LargeIsFake(mode):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _LargeIsFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives no memory to large new tensors."""

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
        name = func._schema.name.removeprefix("aten::")
        if name in _FACTORIES and _bytes(args[0], kwargs) > LARGE:
            with self._mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _bytes(shape: Any, kwargs: dict[str, Any]) -> int:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return int(math.prod(shape) * dtype.itemsize)


def _copied(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake; shared ones stay shared."""
    copies: dict[int, Any] = {}  # what deepcopy takes for objects that it has copied already
    for tensor in _tensors(model):
        fake = fake_like(tensor, mode, device)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = (
            nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        )
    return copy.deepcopy(model, copies)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
