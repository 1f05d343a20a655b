"""Settings that run forward and loss of the model under autocast."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from threading import get_ident
from typing import Any, ClassVar

from stepscope.memory.model_states import instances_of, with_subclasses
from stepscope.settings.model import Call, ModelSetting
from stepscope.settings.setting import Training

LAYERS = 8  # Number of layers whose dtype is read in the first forward pass.


class Autocast(ModelSetting):
    """Autocast from the first training call of the model to `backward()`."""

    works_in_ddp = True
    OWN: ClassVar[str] = "Autocast is already in use."

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self._own_autocast = False
        self._device_type, self._passes = "cuda", 0
        self._context: Any = None
        self._thread = 0
        self._handles: list[Any] = []
        self._dtypes: set[str] = set()

    def dtype(self) -> Any:
        raise NotImplementedError

    def problem(self, subject: Training) -> str | None:
        torch, device, kind = sys.modules["torch"], subject.device.type, type(subject.model)
        if self._own_autocast or torch.is_autocast_enabled(device):
            return self.OWN
        if device not in ("cpu", "cuda"):
            return f"Not supported on the device {device}."
        if any(p.dtype is not torch.float32 for p in subject.model.parameters()):
            return f"{kind.__name__} has parameters of other types than float32."
        losses = with_subclasses("torch.nn.modules.loss", "BCELoss")
        if device == "cuda" and instances_of(losses):
            return "The script has a BCELoss, which raises under autocast. Use BCEWithLogitsLoss."
        if not _layers(subject):
            return f"{kind.__name__} has no linear layer or convolution."
        return super().problem(subject)

    def replaced(self, subject: Training, call: Call) -> Call:
        torch, model = sys.modules["torch"], subject.model
        self._thread = get_ident()
        self._torch, self._device_type = torch, subject.device.type

        def forward(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:  # such as an evaluation; autocast belongs to one thread
                return call(*args, **kwargs)
            if torch.is_grad_enabled():
                self._begin_pass()
            elif self._context is not None:  # between a forward pass and its `backward()`
                # A target network stays in the pass; an evaluation, of a skipped batch, does not.
                off = torch.autocast(self._device_type, enabled=False)
                # Weights cast without gradients are not for training, and the script may change
                # the weights for this call.
                torch.clear_autocast_cache()
                with nullcontext() if model.training else off:
                    outputs = call(*args, **kwargs)
                torch.clear_autocast_cache()
                return outputs
            return call(*args, **kwargs)

        for layer in _layers(subject):
            self._handles.append(layer.register_forward_hook(self._read_dtype))
        self._begin_pass()  # the call that has begun
        return forward

    def _begin_pass(self) -> None:
        if self._context is None and not self._own_autocast:
            self._context = self._torch.autocast(self._device_type, dtype=self.dtype())
            self._context.__enter__()
            self._passes += 1

    def end_pass(self) -> None:
        """Leave autocast: before `backward()`, after a step, at the start of a DataLoader."""
        if self._context is not None and get_ident() == self._thread:
            context, self._context = self._context, None
            context.__exit__(None, None, None)
        while self._handles:
            self._handles.pop().remove()

    def autocast_entered(self, context: Any) -> None:
        """End the setting if the context is an autocast of the script."""
        # Checkpointed code enters the autocast of its forward again in backward().
        if context._enabled and context is not self._context and not in_backward():
            self._own_autocast = True
            self.end_pass()

    def _read_dtype(self, layer: Any, inputs: Any, output: Any) -> None:
        self._dtypes.add(str(getattr(output, "dtype", None)))

    def evidence(self) -> tuple[bool, str]:
        if self._own_autocast:
            return False, self.OWN
        seen = ", ".join(sorted(self._dtypes))
        text = f"{self._passes} forward passes under autocast; output of layers: {seen}."
        return str(self.dtype()) in self._dtypes, text

    def lines(self) -> list[str]:
        return self.code.format(device=self._device_type).splitlines()


class Bf16(Autocast):
    name = "bf16"
    code = 'with torch.autocast("{device}", dtype=torch.bfloat16):\n    ...  # forward and loss'

    def dtype(self) -> Any:
        return sys.modules["torch"].bfloat16

    def problem(self, subject: Training) -> str | None:
        cuda = sys.modules["torch"].cuda
        if subject.device.type == "cuda" and not cuda.is_bf16_supported(including_emulation=False):
            return "This GPU has no bfloat16 operations."
        return super().problem(subject)


class Fp16(Autocast):
    """Scales the gradients within `backward()`, with the kernels and the scale of GradScaler.

    For trials only: code of the script that runs within `backward()`, such as hooks, sees scaled
    gradients, and a skipped step has no gradients.
    """

    name = "fp16"
    code = (
        'scaler = torch.amp.GradScaler("{device}")\n'
        'with torch.autocast("{device}", dtype=torch.float16):\n'
        "    ...  # forward and loss\n"
        "scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)  # before code that reads or clips gradients\n"
        "scaler.step(optimizer)\n"
        "scaler.update()"
    )
    trials_only = True
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    # Defaults of torch.amp.GradScaler.
    SCALE, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
    _is_scaled = False
    _steps = _skipped = 0

    def dtype(self) -> Any:
        return sys.modules["torch"].float16

    def problem(self, subject: Training) -> str | None:
        parameters, name = list(subject.model.parameters()), type(subject.model).__name__
        if subject.device.type not in self.devices:
            return f"float16 is slow on the device {subject.device.type}. Use bf16."
        if len(subject.optimizers) != 1:
            return "Several optimizers are not supported."
        if any(p.device != subject.device or hasattr(p, "device_mesh") for p in parameters):
            return f"{name} has parameters on several devices."
        if any(getattr(module, "sparse", False) for module in subject.model.modules()):
            return "Sparse gradients are not supported."
        return super().problem(subject)

    def enter(self, subject: Training) -> None:
        super().enter(subject)
        full = self._torch.full
        # Float and int tensors of one element, as GradScaler's.
        self._scale = full((), self.SCALE, device=subject.device)
        self._growth = full((), 0, dtype=self._torch.int32, device=subject.device)
        self._found_inf = full((), 0.0, device=subject.device)
        self._parameters = list(subject.model.parameters())
        subject.optimizers[0].register_step_pre_hook(self._before_step)

    def backward(self, call: Call, losses: Any, args: Any, kwargs: Any) -> Any:
        """Call `torch.autograd.backward`; gradients are scaled inside of it only."""
        if self._own_autocast or in_backward():
            return call(losses, *args, **kwargs)
        if kwargs.get("create_graph") or any(args[2:3]):
            self.failed = "The script differentiates its gradients (create_graph=True)."
        roots = losses if isinstance(losses, (list, tuple)) else (losses,)
        if gradients := self._gradients():  # of earlier passes: exact, the scale is a power of 2
            self._torch._foreach_mul_(gradients, self._scale)
        hooks = [root.register_hook(self._scaled) for root in roots if root.requires_grad]
        try:
            return call(losses, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            if gradients := self._gradients():
                unscale = self._torch._amp_foreach_non_finite_check_and_unscale_
                unscale(gradients, self._found_inf, self._scale.double().reciprocal().float())
            self._is_scaled = True

    def _scaled(self, gradient: Any) -> Any:
        return gradient * self._scale.to(gradient)

    def _gradients(self) -> list[Any]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Skip the step if a gradient is inf or NaN: without gradients, step() does nothing."""
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            self.failed = "The script gives step() a closure."
        elif self._is_scaled and self._found_inf.item():
            self._skipped += 1
            for parameter in self._parameters:
                parameter.grad = None

    def after_step(self, optimizer: Any) -> None:
        if not self._is_scaled:
            return
        self._is_scaled = False
        self._steps += 1
        update = self._torch._amp_update_scale_
        update(self._scale, self._growth, self._found_inf, self.GROWTH, self.BACKOFF, self.INTERVAL)
        self._found_inf.zero_()

    def evidence(self) -> tuple[bool, str]:
        is_seen, text = super().evidence()
        text += f" The scale is {self._scale.item():g}; {self._skipped} of {self._steps} steps were"
        return is_seen and self._steps >= 2 * self._skipped, f"{text} skipped."


def in_backward() -> bool:
    """Return True inside of a backward pass, where checkpointed code runs again."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)


def _layers(subject: Training) -> list[Any]:
    """Return some layers that autocast runs in the smaller type."""
    nn = sys.modules["torch"].nn
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return [m for m in subject.model.modules() if isinstance(m, kinds)][:LAYERS]
