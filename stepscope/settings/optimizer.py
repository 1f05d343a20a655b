"""Settings of optimizers."""

from __future__ import annotations

import inspect
import sys
from typing import Any, ClassVar

from stepscope.settings.setting import Moment, Setting


class Implementation(Setting):
    """Set in the parameter groups at the construction, which torch reads at each step."""

    moment = Moment.OPTIMIZER

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self._names: list[str] = []
        self._steps = self._kept = 0

    def problem(self, subject: Any) -> str | None:
        kind = type(subject)
        arguments = inspect.signature(kind.__init__).parameters
        if self.name not in arguments and "kwargs" not in arguments:
            return f"{kind.__name__} has no argument {self.name}."
        if not f"{kind.__module__}.".startswith("torch.optim."):
            return f"{kind.__name__} is not a class of torch.optim, and may have another step."
        for group in subject.param_groups:
            for other in ("fused", "foreach", "capturable", "differentiable"):
                if group.get(other):
                    return f"The optimizer already has {other}=True."
            if any(hasattr(one, "device_mesh") for one in group["params"]):
                return f"{self.name} is not applied to DTensor parameters."
        return None

    def enter(self, subject: Any) -> None:
        self._names.append(type(subject).__name__)
        former = {n: subject.defaults[n] for n in ("fused", "foreach") if n in subject.defaults}
        for values in (subject.defaults, *subject.param_groups):
            values |= {**dict.fromkeys(former, False), self.name: True}
        if self.name == "fused":
            subject._step_supports_amp_scaling = True  # as the constructor does

        def undo_amp(optimizer: Any) -> None:
            if not all(group.get("fused") for group in optimizer.param_groups):
                vars(optimizer).pop("_step_supports_amp_scaling", None)  # read by GradScaler

        def first_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            handle.remove()
            gradients = [one.grad for one in _parameters(optimizer)]
            if any(one is not None and one.is_sparse for one in gradients):
                for values in (optimizer.defaults, *optimizer.param_groups):
                    values |= former
                undo_amp(optimizer)
                self.refusals[f"{self.name} is not applied to sparse gradients."] = None
                self.refused_places[None] = None

        handle = subject.register_step_pre_hook(first_step)
        subject.register_load_state_dict_post_hook(undo_amp)

        def saved(optimizer: Any, state: dict[str, Any]) -> None:
            for group in state["param_groups"]:
                if group.get(self.name) is True:
                    group |= former

        subject.register_state_dict_post_hook(saved)

    def after_step(self, optimizer: Any) -> None:
        self._steps += 1
        self._kept += all(group.get(self.name) is True for group in optimizer.param_groups)

    def evidence(self) -> tuple[bool, str]:
        named = ", ".join(dict.fromkeys(self._names))
        text = f"{self.name}=True in all groups at {self._kept} of {self._steps} steps of {named}."
        return self._kept > 0, text if self._steps else f"{named} made no step."

    def lines(self) -> list[str]:
        names = dict.fromkeys(self._names or ["AdamW"])
        return [f"{name}(..., {self.name}=True)" for name in names]


class Fused(Implementation):
    name = "fused"

    def problem(self, subject: Any) -> str | None:
        if (found := super().problem(subject)) is not None:
            return found
        torch = sys.modules["torch"]
        supported = sys.modules["torch.optim.optimizer"]._get_fused_kernels_supported_devices()
        if type(subject).__name__ == "Adagrad" and torch.cuda.is_initialized():
            return "The fused implementation of Adagrad supports CPUs only."
        # torch 2.13 leaves the buffers of a first step that GradScaler skips uninitialized, and
        # raises for a parameter whose first gradient comes later than others'.
        if any(group.get("momentum") for group in subject.param_groups):
            return "Fused SGD with momentum may train on uninitialized memory."
        for one in _parameters(subject):
            if one.device.type not in supported or not torch.is_floating_point(one):
                return f"fused does not support {one.dtype} on {one.device.type}."
            # torch 2.13 leaves all but the last elements unchanged.
            if isinstance(subject, torch.optim.SGD) and one.is_cpu and one.itemsize == 2:
                return "Fused SGD does not update 16-bit parameters on a CPU."
        return None


class Foreach(Implementation):
    name = "foreach"

    def problem(self, subject: Any) -> str | None:
        default = sys.modules["torch.optim.optimizer"]._default_to_fused_or_foreach
        is_unset = subject.defaults.get("foreach", True) is None
        if (
            is_unset
            and type(subject).__name__ != "Adafactor"
            and default(_parameters(subject), False)[1]
        ):
            return "foreach is torch's default for these parameters."
        if (found := super().problem(subject)) is not None:
            return found
        options = [o for g in subject.param_groups for o in (g.get("lr"), *g.get("betas", ()))]
        if any(map(sys.modules["torch"].is_tensor, options)):
            return "foreach is not applied to tensors as lr or betas."
        return None


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


class SetToNone(Setting):
    name = "set_to_none"
    code = "optimizer.zero_grad(set_to_none=True)"
    moment = Moment.OPTIMIZER
    ALREADY: ClassVar[str] = "The script already calls zero_grad(set_to_none=True), the default."
    _active = False
    _calls = _changed = 0

    def enter(self, subject: Any) -> None:
        self._active = True

    def zero_grad(self, given: bool) -> bool:
        """Return the argument for one call of `zero_grad(set_to_none=given)`."""
        self._calls += 1
        self._changed += self._active and not given
        if self.is_probe and given:
            self._applies, self.refusals = False, {self.ALREADY: None}
        return given or self._active

    def evidence(self) -> tuple[bool, str]:
        if not self._calls:
            return False, "The script does not call Optimizer.zero_grad()."
        if not self._changed:
            return False, self.ALREADY
        return True, f"{self._changed} of {self._calls} calls of zero_grad() were changed."
