"""The setting that runs forward and loss of the model under autocast."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from threading import get_ident
from typing import Any, ClassVar

from stepscope.memory.model_states import instances_of, with_subclasses
from stepscope.settings.model import Call, ModelSetting
from stepscope.settings.setting import Training


class Bf16(ModelSetting):
    """Autocast from the first training call of the model to `backward()`."""

    name = "bf16"
    code = 'with torch.autocast("{device}", dtype=torch.bfloat16):\n    ...  # forward and loss'
    works_in_ddp = True
    OWN: ClassVar[str] = "Autocast is already in use."

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self._own_autocast = False
        self._device_type = "cuda"
        self._passes = 0
        self._context: Any = None
        self._thread = 0
        self._handles: list[Any] = []
        self._dtypes: set[str] = set()

    def problem(self, subject: Training) -> str | None:
        torch = sys.modules["torch"]
        device = subject.device.type
        name = type(subject.model).__name__
        if self._own_autocast or torch.is_autocast_enabled(device):
            return self.OWN
        if device not in ("cpu", "cuda"):
            return f"Not supported on the device {device}."
        if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "This GPU has no bfloat16 operations."
        if any(p.dtype is not torch.float32 for p in subject.model.parameters()):
            return f"{name} has parameters of other types than float32."
        losses = with_subclasses("torch.nn.modules.loss", "BCELoss")
        if device == "cuda" and instances_of(losses):
            return "The script has a BCELoss, which raises under autocast. Use BCEWithLogitsLoss."
        if not _layers(subject):
            return f"{name} has no linear layer or convolution."
        return super().problem(subject)

    def replaced(self, subject: Training, call: Call) -> Call:
        torch = self._torch = sys.modules["torch"]
        model = subject.model
        self._thread = get_ident()
        self._device_type = subject.device.type

        def forward(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:  # such as an evaluation; autocast belongs to one thread
                return call(*args, **kwargs)
            if torch.is_grad_enabled():
                self._begin_pass()
            elif self._context is not None:  # between a forward pass and its `backward()`
                # A target network stays in the pass; an evaluation, of a skipped batch, does not.
                off = torch.autocast(self._device_type, enabled=False)
                context = nullcontext() if model.training else off
                # Weights cast without gradients are not for training, and the script may change
                # the weights for this call.
                torch.clear_autocast_cache()
                with context:
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
            self._context = self._torch.autocast(self._device_type, dtype=self._torch.bfloat16)
            self._context.__enter__()
            self._passes += 1

    def end_pass(self) -> None:
        """Leave autocast: before `backward()`, after a step, at the start of a DataLoader."""
        if self._context is not None and get_ident() == self._thread:
            context = self._context
            self._context = None
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
        return "torch.bfloat16" in self._dtypes, text

    def lines(self) -> list[str]:
        return self.code.format(device=self._device_type).splitlines()


def in_backward() -> bool:
    """Return True inside of a backward pass, where checkpointed code runs again."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)


def _layers(subject: Training) -> list[Any]:
    """Return the layers that autocast runs in the smaller type."""
    nn = sys.modules["torch"].nn
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return [m for m in subject.model.modules() if isinstance(m, kinds)]
