"""Settings of the model, applied at its first training call.

They replace `_compiled_call_impl`, the attribute of `Module.compile()`: every call uses it, no
name of a parameter changes, and neither pickle nor deepcopy of a module contains it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from stepscope.settings.setting import Moment, Setting, Training

Call = Callable[..., Any]

LAYERS = 8  # Number of layers whose dtype is read in the first forward pass.
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


class Bf16(ModelSetting):
    name = "bf16"
    help = "Runs forward and loss under bfloat16 autocast; weights stay in float32."
    code = 'with torch.autocast("{device}", dtype=torch.bfloat16):\n    ...  # forward and loss'
    changes = "matrix products and convolutions have 7 bits of mantissa"
    reversible = True
    works_in_ddp = True
    OWN: ClassVar[str] = "The script uses autocast itself."

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self._is_active, self._own_autocast = True, False
        self._device_type, self._passes = "cuda", 0
        self._context: Any = None
        self._handles: list[Any] = []
        self._dtypes: set[str] = set()

    def problem(self, subject: Training) -> str | None:
        torch, device, kind = sys.modules["torch"], subject.device.type, type(subject.model)
        if self._own_autocast or torch.is_autocast_enabled(device):
            return self.OWN
        if device not in ("cpu", "cuda"):
            return f"Not supported on the device {device}."
        if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "This GPU has no bfloat16 operations."
        if any(p.dtype is not torch.float32 for p in subject.model.parameters()):
            return f"{kind.__name__} has parameters of other types than float32."
        loss = torch.nn.BCELoss
        if device == "cuda" and any(issubclass(type(one), loss) for one in gc.get_objects()):
            return "The script has a BCELoss, which raises under autocast. Use BCEWithLogitsLoss."
        if not _layers(subject):
            return f"{kind.__name__} has no linear layer or convolution."
        return super().problem(subject)

    def replaced(self, subject: Training, call: Call) -> Call:
        torch = self._torch = sys.modules["torch"]
        self._device_type = subject.device.type

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._begin_pass()
            else:  # an evaluation
                self.end_pass()
            return call(*args, **kwargs)

        for layer in _layers(subject):
            self._handles.append(layer.register_forward_hook(self._read_dtype))
        self._begin_pass()  # the call that has begun
        return forward

    def _begin_pass(self) -> None:
        if self._context is None and self._is_active and not self._own_autocast:
            self._context = self._torch.autocast(self._device_type, dtype=self._torch.bfloat16)
            self._context.__enter__()
            self._passes += 1

    def end_pass(self) -> None:
        """Leave autocast: before `backward()`, after a step, before an evaluation."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
        while self._handles:
            self._handles.pop().remove()

    def leave(self) -> None:
        self._is_active = False
        self.end_pass()

    def autocast_entered(self, context: Any) -> None:
        """End the setting if the context is an autocast of the script."""
        # Checkpointed code enters the autocast of its forward again in backward().
        is_backward = sys.modules["torch"]._C._current_graph_task_id() != -1
        if context._enabled and context is not self._context and not is_backward:
            self._own_autocast = True
            self.end_pass()

    def _read_dtype(self, layer: Any, inputs: Any, output: Any) -> None:
        self._dtypes.add(str(getattr(output, "dtype", None)))

    def evidence(self) -> tuple[bool, str]:
        if self._own_autocast:
            return False, self.OWN
        seen = ", ".join(sorted(self._dtypes))
        text = f"{self._passes} forward passes under autocast; output of layers: {seen}."
        return "torch.bfloat16" in self._dtypes, text

    def lines(self) -> list[str]:
        return self.code.format(device=self._device_type).splitlines()


class ChannelsLast(ModelSetting):
    name = "channels_last"
    help = "Stores images and weights of convolutions in NHWC order."
    code = (
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)"
    )
    changes = "other convolution algorithms may round differently"
    _inputs = 0
    _is_tried = False

    def problem(self, subject: Training) -> str | None:
        self._torch = torch = sys.modules["torch"]
        convolutions = [m for m in subject.model.modules() if isinstance(m, torch.nn.Conv2d)]
        self._weights = [convolution.weight for convolution in convolutions]
        if not self._weights:
            return f"{type(subject.model).__name__} has no Conv2d."
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
    name = "compile"
    help = "Compiles the model; batches of another size and evaluation run uncompiled."
    code = "model = torch.compile(model)"
    changes = "fused kernels may round differently"
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


def _layers(subject: Training) -> list[Any]:
    """Return some layers that autocast runs in bfloat16."""
    nn = sys.modules["torch"].nn
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return [m for m in subject.model.modules() if isinstance(m, kinds)][:LAYERS]


def _sizes(torch: Any, values: tuple[Any, ...]) -> Iterator[int]:
    """Yield the first dimension of the tensors in the arguments of a call."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            yield value.size(0)
        elif isinstance(value, (list, tuple, dict)):
            yield from _sizes(torch, tuple(value.values() if isinstance(value, dict) else value))
