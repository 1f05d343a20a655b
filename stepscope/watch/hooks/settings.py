"""Apply the settings of `stepscope watch --with` from wrappers of torch.

Wrapped are the construction and iteration of DataLoaders, the construction and `step` of
optimizers, for some settings copies, and until the model is known the calls of all
modules. The wrappers of `backward` and `zero_grad` are those of `loss.py`.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import MethodType, ModuleType
from typing import Any

from stepscope.settings import Setting
from stepscope.settings.autocast import Bf16
from stepscope.settings.loader import LoaderSetting, NonBlocking
from stepscope.settings.model import ModelSetting
from stepscope.settings.setting import Moment, Training, script_place
from stepscope.watch.hooks.patching import (
    Function,
    HookGuard,
    opaque,
    replace_bound,
    replace_call,
)


class SettingHooks:
    """Applies settings; `report` is called with the entries of run.json.

    That is at the start, at `end`, and after the optimizer steps 1, 2, 4, 8, …, so that the folder
    of a killed run has the entries too.
    """

    def __init__(
        self, settings: Sequence[Setting], report: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self.settings = settings
        self.is_active = True  # False in a forked child.
        self._report = report
        self._steps = 0
        self._guard = HookGuard("settings of the model")
        self._optimizers: list[weakref.ref[Any]] = []
        moments = {setting.moment for setting in settings}
        self._awaits_training = Moment.TRAINING in moments
        self._awaits_model = Moment.MODEL in moments
        self._autocasts = [one for one in settings if isinstance(one, Bf16)]
        self.end()

    def end(self) -> list[dict[str, Any]]:
        """Report and return the entries of run.json."""
        entries = [setting.as_json() for setting in self.settings]
        self._report(entries)
        return entries

    def attach(self, torch: ModuleType) -> None:
        """Apply the settings of the import of torch, and wrap functions for the others."""
        self._apply(Moment.IMPORT, torch)
        self._torch = torch
        self._is_compiling = torch.compiler.is_compiling
        loaders, optimizers = import_module("torch.utils.data.dataloader"), torch.optim.Optimizer
        self._arguments = inspect.signature(loaders.DataLoader.__init__)
        replace_call(loaders.DataLoader, "__init__", self._make_loader)
        replace_call(loaders.DataLoader, "_get_iterator", self._get_iterator)
        replace_call(optimizers, "__init__", self._make_optimizer)
        if self._autocasts:
            replace_call(torch.autocast, "__enter__", self._enter_autocast)
            replace_call(torch.autograd, "grad", self._grad)
        for setting in self.settings:
            if isinstance(setting, NonBlocking) and setting.places:
                for name in ("to", "cuda"):
                    around = partial(self._around_copy, setting)
                    replace_bound(torch.Tensor, name, around)
        for function in (self._after_step, self._model_called, Setting.guard, NonBlocking.copy):
            opaque(function, with_callees=True)
        # The hook below is removed at the first training call, which is not compiled.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        modules = import_module("torch.nn.modules.module")
        self._calls = modules.register_module_forward_pre_hook(self._before_call)
        import_module("torch.optim.optimizer").register_optimizer_step_post_hook(self._after_step)

    def _apply(self, moment: Moment, subject: Any) -> list[Setting]:
        """Apply the settings of a moment; return those that were entered."""
        entered = []
        for setting in self.settings if self.is_active else ():
            is_refused = setting.failed is not None or moment is Moment.MODEL and setting.refusals
            if setting.moment is moment and not is_refused:
                count = len(setting.places)
                has_place = moment in (Moment.LOADER, Moment.OPTIMIZER)
                setting.guard(setting.apply, subject, script_place() if has_place else None)
                entered += [setting] * (len(setting.places) - count)
        return entered

    def _make_loader(self, original: Function, loader: Any, /, *args: Any, **kwargs: Any) -> None:
        """Replace `DataLoader.__init__`, which subclasses call too."""
        try:
            bound = self._arguments.bind(loader, *args, **kwargs)
        except TypeError:  # of the script, which the original raises too
            original(loader, *args, **kwargs)
            return
        bound.apply_defaults()
        entered = self._apply(Moment.LOADER, bound.arguments)
        if entered:
            args, kwargs = bound.args[1:], bound.kwargs
        original(loader, *args, **kwargs)
        for setting in entered:
            if isinstance(setting, LoaderSetting):
                setting.loaders.append(weakref.ref(loader))

    def _get_iterator(self, original: Function, loader: Any) -> Any:
        for autocast in self._autocasts:  # of a last batch that the script skipped
            autocast.guard(autocast.end_pass)
        iterator = original(loader)
        for setting in self.settings if self.is_active else ():
            if isinstance(setting, LoaderSetting):
                setting.guard(setting.iterating, loader, iterator)
        return iterator

    def _make_optimizer(
        self, original: Function, optimizer: Any, /, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))
        if not self._awaits_model:
            self._refuse_models("A later optimizer was constructed after the first step.")
        self._apply(Moment.OPTIMIZER, optimizer)

    def before_backward(self, tensors: Any) -> None:
        """Act before `torch.autograd.backward(tensors)`, in any thread."""
        root = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        self._begin_training(getattr(root, "device", None))
        self._end_pass()

    def _grad(
        self, original: Function, /, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace `torch.autograd.grad`: like `backward()`, except for a term of the loss."""
        if not (kwargs.get("create_graph") or any(args[2:3])):
            self._end_pass()
        return original(outputs, inputs, *args, **kwargs)

    def _enter_autocast(self, original: Function, context: Any) -> Any:
        for setting in self._autocasts:
            setting.autocast_entered(context)
        return original(context)

    def _around_copy(self, setting: NonBlocking, original: Function) -> Callable[..., Any]:
        """Return a function that binds `Tensor.to` or `Tensor.cuda`."""

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return setting.copy(original, tensor, args, kwargs)

        opaque(copy)
        is_plain = self._is_compiling
        return lambda tensor: None if is_plain() or not self.is_active else MethodType(copy, tensor)

    def _begin_training(self, device: Any) -> None:
        """Apply the settings that need the device of the training, once."""
        if self._awaits_training and device is not None:
            self._awaits_training = False
            self._apply(Moment.TRAINING, Training(device))

    def _before_call(self, module: Any, args: Any) -> None:
        """Pre hook of all modules, until the first training call of the model."""
        if not self._is_compiling():
            self._guard.call(self._model_called, module)

    def _model_called(self, model: Any) -> None:
        """Apply the settings of the model if its first training call begins.

        Until an optimizer exists, calls may be trials of the script. Modules without a parameter of
        an optimizer, such as losses and frozen teachers, are no models here.
        """
        if not self._torch.is_grad_enabled():
            return
        own = {id(parameter): parameter for parameter in model.parameters()}
        if not own:
            return
        device = next(iter(own.values())).device
        self._begin_training(device)
        optimizers = [one for one in (known() for known in self._optimizers) if one is not None]
        trained = {id(p) for one in optimizers for g in one.param_groups for p in g["params"]}
        if self._awaits_model and not trained.isdisjoint(own):
            self._awaits_model = False
            if not trained <= own.keys():
                self._refuse_models(
                    "Several models are not supported: the optimizers also train parameters "
                    f"outside of the first model called ({type(model).__name__})."
                )
            self._apply(Moment.MODEL, Training(device, model, tuple(optimizers)))
        if not self._awaits_model:
            self._calls.remove()

    def _refuse_models(self, reason: str) -> None:
        for setting in self.settings:
            if isinstance(setting, ModelSetting):
                setting.refusals.setdefault(None, reason)

    def _end_pass(self) -> None:
        for setting in self.settings:
            if isinstance(setting, ModelSetting) and setting.places:
                setting.guard(setting.end_pass)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Post hook of all optimizers' `step`."""
        self._end_pass()
        for setting in self.settings if self.is_active else ():
            if setting.places:
                setting.guard(setting.after_step, optimizer)
        self._steps += 1
        if self.is_active and self._steps & (self._steps - 1) == 0:
            self.end()
