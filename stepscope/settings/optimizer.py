"""Settings of optimizers."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from stepscope.settings.setting import Moment, Setting


class Fused(Setting):
    """Set in the parameter groups at the construction, which torch reads at each step."""

    name = "fused"
    moment = Moment.OPTIMIZER

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self._names: list[str] = []
        self._steps = 0
        self._fused_steps = 0

    def problem(self, subject: Any) -> str | None:
        torch = sys.modules["torch"]
        kind = type(subject)
        arguments = inspect.signature(kind.__init__).parameters
        if "fused" not in arguments and "kwargs" not in arguments:
            return f"{kind.__name__} has no argument fused."
        if not f"{kind.__module__}.".startswith("torch.optim."):
            return f"{kind.__name__} is not a class of torch.optim, and may have another step."
        for group in subject.param_groups:
            for other in ("fused", "foreach", "capturable", "differentiable"):
                if group.get(other):
                    return f"The optimizer already has {other}=True."
            # torch 2.13 leaves the buffers of a first step that GradScaler skips uninitialized, and
            # raises for a parameter whose first gradient comes later than others'.
            if group.get("momentum"):
                return "Fused SGD with momentum may train on uninitialized memory."
        if kind.__name__ == "Adagrad" and torch.cuda.is_initialized():
            return "The fused implementation of Adagrad supports CPUs only."
        supported = sys.modules["torch.optim.optimizer"]._get_fused_kernels_supported_devices()
        for one in _parameters(subject):
            if hasattr(one, "device_mesh"):
                return "fused is not applied to DTensor parameters."
            if one.device.type not in supported or not torch.is_floating_point(one):
                return f"fused does not support {one.dtype} on {one.device.type}."
            # torch 2.13 leaves all but the last elements unchanged.
            if isinstance(subject, torch.optim.SGD) and one.is_cpu and one.itemsize == 2:
                return "Fused SGD does not update 16-bit parameters on a CPU."
        return None

    def enter(self, subject: Any) -> None:
        self._names.append(type(subject).__name__)
        defaults = subject.defaults
        former = {name: defaults[name] for name in ("fused", "foreach") if name in defaults}
        for values in (defaults, *subject.param_groups):
            values |= {**dict.fromkeys(former, False), "fused": True}
        subject._step_supports_amp_scaling = True  # as the constructor does; GradScaler reads it

        def loaded(optimizer: Any) -> None:
            if not _is_fused(optimizer):
                vars(optimizer).pop("_step_supports_amp_scaling", None)

        def first_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            handle.remove()
            gradients = [one.grad for one in _parameters(optimizer)]
            if any(one is not None and one.is_sparse for one in gradients):
                for values in (optimizer.defaults, *optimizer.param_groups):
                    values |= former
                loaded(optimizer)
                self.refusals[None] = "fused is not applied to sparse gradients."

        def saved(optimizer: Any, state: dict[str, Any]) -> None:
            for group in state["param_groups"]:
                if group.get("fused"):
                    group |= former

        handle = subject.register_step_pre_hook(first_step)
        subject.register_load_state_dict_post_hook(loaded)
        subject.register_state_dict_post_hook(saved)

    def after_step(self, optimizer: Any) -> None:
        self._steps += 1
        self._fused_steps += _is_fused(optimizer)

    def evidence(self) -> tuple[bool, str]:
        named = ", ".join(dict.fromkeys(self._names))
        if not self._steps:
            return False, f"{named} made no step."
        steps = f"{self._fused_steps} of {self._steps} steps of {named}"
        return self._fused_steps > 0, f"fused=True in all groups at {steps}."

    def lines(self) -> list[str]:
        return [f"{name}(..., fused=True)" for name in dict.fromkeys(self._names or ["AdamW"])]


def _is_fused(optimizer: Any) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]
