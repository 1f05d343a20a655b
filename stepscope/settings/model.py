"""Settings of the model, applied at its first training call.

They replace `_compiled_call_impl`, the attribute of `Module.compile()`: every call uses it, no
name of a parameter changes, and neither pickle nor deepcopy of a module contains it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from stepscope.settings.setting import Moment, Setting, Training

Call = Callable[..., Any]

UNSUPPORTED = {"ScriptModule", "FSDPModule", "FullyShardedDataParallel", "OptimizedModule"}
WRAPPERS = {"DistributedDataParallel", "DataParallel"}


class ReplacedCall:
    """The call of a module; pickled and copied as None if its class overrides `__getstate__`."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class ModelSetting(Setting):
    """A setting that changes the calls of the model."""

    moment = Moment.MODEL
    works_in_ddp: ClassVar[bool] = False

    def problem(self, subject: Training) -> str | None:
        kind = type(subject.model)
        bases = bases_of(kind)
        own_call = subject.model._compiled_call_impl
        if bases & UNSUPPORTED or kind.__call__ is not sys.modules["torch"].nn.Module.__call__:
            return f"Not supported for a model of class {kind.__name__}."
        if own_call is not None and not isinstance(own_call, ReplacedCall):
            return "The script compiles its model."
        if bases & WRAPPERS and not self.works_in_ddp:
            return f"Must be applied before the model is wrapped in {kind.__name__}."
        return None

    def enter(self, subject: Training) -> None:
        model = subject.model
        call = model._compiled_call_impl or model._call_impl
        model._compiled_call_impl = ReplacedCall(self.replaced(subject, call))

    def replaced(self, subject: Training, call: Call) -> Call:
        """Return a function that replaces `call` from the second call of the model on."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """Act before `backward()` and after a step."""


class ChannelsLast(ModelSetting):
    name = "channels_last"
    code = (
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)"
    )
    _inputs = 0
    _is_tried = False

    def problem(self, subject: Training) -> str | None:
        self._torch = torch = sys.modules["torch"]
        name = type(subject.model).__name__
        self._weights = [
            module.weight
            for module in subject.model.modules()
            if isinstance(module, torch.nn.Conv2d)
        ]
        if not self._weights:
            return f"{name} has no Conv2d."
        tensors = (*subject.model.parameters(), *subject.model.buffers())
        if any(one.dim() == 5 for one in tensors):  # which Module.to() would convert too, and raise
            return f"{name} has parameters or buffers of five dimensions."
        if self._converted_weights():
            return "The script already uses channels_last."
        return super().problem(subject)

    def replaced(self, subject: Training, call: Call) -> Call:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failed is not None:
                return call(*args, **kwargs)
            if not self._is_tried:
                self._is_tried = True
                return self._first_call(subject, call, args, kwargs)
            return self._converted_call(call, args, kwargs)

        return forward

    def _converted_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: self._convert(value) for name, value in kwargs.items()}
        return call(*map(self._convert, args), **named)

    def _convert(self, value: Any) -> Any:
        """Return an input in NHWC order if it is a batch of images."""
        if not isinstance(value, self._torch.Tensor) or value.dim() != 4:
            return value
        self._inputs += 1
        return value.to(memory_format=self._torch.channels_last)

    def _first_call(
        self, subject: Training, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the converted model; repeat the call without the setting if the model views."""
        torch = self._torch
        self._store_in(torch.channels_last, subject)
        buffers = [(buffer, buffer.clone()) for buffer in subject.model.buffers()]
        devices = [subject.device] if subject.device.type == "cuda" else []
        cpu_state = torch.get_rng_state()
        gpu_states = [torch.cuda.get_rng_state(device) for device in devices]
        try:
            return self._converted_call(call, args, kwargs)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            self.failed = f"The model needs contiguous outputs: {error}"[:300]
        # The random numbers and running statistics are those of before.
        self._store_in(torch.contiguous_format, subject)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(cpu_state)
        for device, state in zip(devices, gpu_states, strict=True):
            torch.cuda.set_rng_state(state, device)
        return call(*args, **kwargs)

    def _store_in(self, layout: Any, subject: Training) -> None:
        """Store the weights, and what optimizers keep for each, in a memory format."""
        subject.model.to(memory_format=layout)
        for optimizer in subject.optimizers:
            for weight in subject.model.parameters():
                state = optimizer.state.get(weight, {}) if weight.dim() == 4 else {}
                for name, value in state.items():
                    if isinstance(value, self._torch.Tensor) and value.dim() == 4:
                        state[name] = value.to(memory_format=layout)

    def _converted_weights(self) -> int:
        """Return the number of weights in NHWC order only."""
        layout = self._torch.channels_last
        return sum(
            weight.is_contiguous(memory_format=layout) and not weight.is_contiguous()
            for weight in self._weights
        )

    def evidence(self) -> tuple[bool, str]:
        kept = self._converted_weights()
        text = f"{kept} of {len(self._weights)} Conv2d weights and {self._inputs} inputs are NHWC."
        return kept > 0 and self._inputs > 0, text


class Compile(ModelSetting):
    """Compiles the model; batches of another size and evaluation run uncompiled."""

    name = "compile"
    code = "model = torch.compile(model)"
    _compiled_calls = 0
    _plain_calls = 0
    _batch_size: int | None = None

    def replaced(self, subject: Training, call: Call) -> Call:
        torch = sys.modules["torch"]

        def inlined(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        # torch skips the methods of torch's modules, such as Sequential, as the outermost function.
        compiled = torch.compile(inlined)

        def forward(*args: Any, **kwargs: Any) -> Any:
            size = next(_sizes(torch, (*args, *kwargs.values())), None)
            is_training = torch.is_grad_enabled()
            if self._batch_size is None and is_training:
                self._batch_size = size
            if self.failed is not None or size != self._batch_size or not is_training:
                self._plain_calls += is_training
                return call(*args, **kwargs)
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                # By name, because torch imports its compiler late.
                if self._compiled_calls or "TorchDynamoException" not in bases_of(type(error)):
                    raise
                cause = getattr(error, "inner_exception", error)
                text = f"{type(cause).__name__}: {cause}".split("\n")[0][:300]
                self.failed = f"The model could not be compiled: {text}"
                return call(*args, **kwargs)
            self._compiled_calls += 1
            return result

        return forward

    def evidence(self) -> tuple[bool, str]:
        if not self._compiled_calls:
            return False, "The script called its model only once, or without gradients."
        counters = sys.modules["torch._dynamo.utils"].counters
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        text = (
            f"{self._compiled_calls} compiled calls, {self._plain_calls} uncompiled; {graphs} "
            f"graphs, {breaks} graph breaks."
        )
        return graphs > 0 and self._compiled_calls >= self._plain_calls, text


def bases_of(kind: type) -> set[str]:
    """Return the names of a class and its bases."""
    return {base.__name__ for base in kind.__mro__}


def _sizes(torch: Any, values: tuple[Any, ...]) -> Iterator[int]:
    """Yield the first dimension of the tensors in the arguments of a call."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            yield value.size(0)
        elif isinstance(value, dict):
            yield from _sizes(torch, tuple(value.values()))
        elif isinstance(value, (list, tuple)):
            yield from _sizes(torch, tuple(value))
