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
        kind, bases = type(subject.model), bases_of(type(subject.model))
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
        convolutions = [m for m in subject.model.modules() if isinstance(m, torch.nn.Conv2d)]
        self._weights = [convolution.weight for convolution in convolutions]
        if not self._weights:
            return f"{type(subject.model).__name__} has no Conv2d."
        tensors = (*subject.model.parameters(), *subject.model.buffers())
        if any(one.dim() == 5 for one in tensors):  # which Module.to() would convert too, and raise
            return f"{type(subject.model).__name__} has parameters or buffers of five dimensions."
        if self._count():
            return "The script already uses channels_last."
        if all(weight.size(1) == 1 or weight[0, 0].numel() == 1 for weight in self._weights):
            return "With one channel or 1x1 kernels both formats are the same."
        return super().problem(subject)

    def replaced(self, subject: Training, call: Call) -> Call:
        torch, layout, model = self._torch, self._torch.channels_last, subject.model

        def convert(one: Any) -> Any:
            if not isinstance(one, torch.Tensor) or one.dim() != 4:
                return one
            self._inputs += 1
            return one.to(memory_format=layout)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failed is not None:
                return call(*args, **kwargs)
            is_first, self._is_tried = not self._is_tried, True
            if is_first:
                self._store_in(layout, subject)
                buffers = [(one, one.clone()) for one in model.buffers()]
                devices = [subject.device] if subject.device.type == "cuda" else []
                states = torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)
            named = {name: convert(value) for name, value in kwargs.items()}
            try:
                return call(*map(convert, args), **named)
            except RuntimeError as error:
                if not is_first or "view size is not compatible" not in str(error):
                    raise
                self.failed = f"The model needs contiguous outputs: {error}"[:300]
            # Repeat the call, with the random numbers and running statistics of before.
            self._store_in(torch.contiguous_format, subject)
            with torch.no_grad():
                for one, value in buffers:
                    one.copy_(value)
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            return call(*args, **kwargs)

        return forward

    def _store_in(self, layout: Any, subject: Training) -> None:
        """Store the weights, and what optimizers keep for each, in a memory format."""
        subject.model.to(memory_format=layout)
        weights = [one for one in subject.model.parameters() if one.dim() == 4]
        for state in (o.state.get(one, {}) for o in subject.optimizers for one in weights):
            for name, one in state.items():
                if isinstance(one, self._torch.Tensor) and one.dim() == 4:
                    state[name] = one.to(memory_format=layout)

    def _count(self) -> int:
        """Return the number of weights in NHWC order only."""
        layout = self._torch.channels_last
        nhwc = [one for one in self._weights if one.is_contiguous(memory_format=layout)]
        return sum(not weight.is_contiguous() for weight in nhwc)

    def evidence(self) -> tuple[bool, str]:
        kept = self._count()
        text = f"{kept} of {len(self._weights)} Conv2d weights and {self._inputs} inputs are NHWC."
        return kept > 0 and self._inputs > 0, text


class Compile(ModelSetting):
    """Compiles the model; batches of another size and evaluation run uncompiled."""

    name = "compile"
    code = "model = torch.compile(model)"
    _calls = _plain_calls = _training_calls = 0
    _is_limited = False
    _error: str | None = None

    def replaced(self, subject: Training, call: Call) -> Call:
        torch, full = sys.modules["torch"], None

        def inlined(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        # torch skips the methods of torch's modules, such as Sequential, as the outermost function.
        compiled = torch.compile(inlined)

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal full
            is_training = torch.is_grad_enabled()
            self._training_calls += is_training
            size = next(_sizes(torch, (*args, *kwargs.values())), None)
            full = size if full is None and is_training else full
            if self._error is not None or size != full or not is_training:
                self._plain_calls += 1
                return call(*args, **kwargs)
            limits = _recompile_limits()
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                # By name, because torch imports its compiler late.
                if self._calls or "TorchDynamoException" not in bases_of(type(error)):
                    raise
                cause = getattr(error, "inner_exception", error)
                self._error = f"{type(cause).__name__}: {cause}".split("\n")[0][:300]
                return call(*args, **kwargs)
            self._is_limited |= _recompile_limits() > limits  # later calls may run uncompiled
            self._calls += not self._is_limited
            self._plain_calls += self._is_limited
            return result

        return forward

    def evidence(self) -> tuple[bool, str]:
        if self._error is not None:
            return False, f"The model could not be compiled: {self._error}"
        if not self._calls:
            return False, "The script called its model only once, or without gradients."
        counters = sys.modules["torch._dynamo.utils"].counters
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        text = f"{self._calls} compiled calls, {self._plain_calls} uncompiled; {graphs} graphs, "
        text += f"{breaks} graph breaks{', recompile limit exceeded' * self._is_limited}."
        return graphs > 0 and 2 * self._calls >= self._training_calls, text


def _recompile_limits() -> int:
    """Return how often torch.compile has reached its limit of recompilations."""
    utils = sys.modules.get("torch._dynamo.utils")
    causes = utils.counters["unimplemented"] if utils is not None else {}
    return sum(n for cause, n in causes.items() if "limit" in cause.split("\n")[0])


def bases_of(kind: type) -> set[str]:
    """Return the names of a class and its bases."""
    return {base.__name__ for base in kind.__mro__}


def _sizes(torch: Any, values: tuple[Any, ...]) -> Iterator[int]:
    """Yield the first dimension of the tensors in the arguments of a call."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            yield value.size(0)
        elif isinstance(value, (list, tuple, dict)):
            yield from _sizes(torch, tuple(value.values() if isinstance(value, dict) else value))
