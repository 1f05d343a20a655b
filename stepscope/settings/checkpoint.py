"""Activation checkpointing of the repeated blocks of a model."""

from __future__ import annotations

import random
import sys
from collections import deque
from importlib import import_module
from itertools import zip_longest
from typing import Any

import numpy as np

from stepscope.settings.model import Call, ModelSetting, ReplacedCall
from stepscope.settings.setting import Training

MIN_BLOCKS = 3
IN_PLACE = "An input or buffer of {} changes in place (BatchNorm)."
_PLAIN = (bool, bytes, complex, float, int, str)


class Checkpoint(ModelSetting):
    """Replaces the calls of the blocks; the first pass runs as before, and is checked."""

    name = "checkpoint"
    code = (
        "block_output = checkpoint(block, *inputs, use_reentrant=False)  # torch.utils.checkpoint"
    )
    works_in_ddp = True
    _is_active = False
    _calls = _runs = 0

    def problem(self, subject: Training) -> str | None:
        model, nn = subject.model, sys.modules["torch"].nn
        self._blocks = _repeated(nn, model)
        self._kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in self._blocks))
        inner = [module for block in self._blocks for module in block.modules()]
        if model._compiled_call_impl is not None or any(one._compiled_call_impl for one in inner):
            return "The model is compiled, and the compiler chooses what to recompute."
        if any(getattr(one, "gradient_checkpointing", False) is True for one in model.modules()):
            return "The script already uses activation checkpointing."
        if not inner:
            kind = type(model).__name__
            return f"{kind} has no ModuleList or Sequential with {MIN_BLOCKS} blocks of one class."
        if any(one._forward_hooks or one._forward_pre_hooks for one in inner):
            return f"{self._kinds} has forward hooks, which would run twice."
        return super().problem(subject)

    def enter(self, subject: Training) -> None:
        self._versions: list[tuple[Any, int]] = []
        """Inputs and buffers of the blocks in the first pass."""
        for block in self._blocks:
            block._compiled_call_impl = ReplacedCall(self._around(block))

    def _around(self, block: Any) -> Call:
        call, torch = block._call_impl, sys.modules["torch"]
        buffers = list(block.buffers())  # not in each call, which takes 0.1 ms
        checkpoint = import_module("torch.utils.checkpoint").checkpoint

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._runs += 1
            return call(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self.failed is not None:
                return call(*args, **kwargs)
            values = _flat((*args, *kwargs.values()))
            known = (torch.Tensor, torch.dtype, bool, int, float, str, type(None))
            other = next((type(one).__name__ for one in values if not isinstance(one, known)), None)
            if other is not None:
                self.failed = f"{self._kinds} has an input of class {other}, which it may change."
                return call(*args, **kwargs)
            if self._is_active:
                self._calls += 1
                before = [_version(one) for one in buffers]
                result = checkpoint(counted, *args, use_reentrant=False, **kwargs)
                if before != [_version(one) for one in buffers]:
                    self.failed = IN_PLACE.format(self._kinds)
                return result
            values += buffers
            self._versions += [(a, _version(a)) for a in values if isinstance(a, torch.Tensor)]
            state: list[tuple[str, Any]] = []
            self.guard(lambda: state.extend(_state(block)))
            result = call(*args, **kwargs)
            self.guard(self._compare, state, block)
            return result

        return forward

    def _compare(self, state: list[tuple[str, Any]], block: Any) -> None:
        """Refuse a block whose state its first call has changed."""
        if self.failed is None and (what := _changed(state, _state(block))) is not None:
            self.failed = f"{self._kinds} {what} in forward(), which would run twice."

    def end_pass(self) -> None:
        """Begin to checkpoint after a first pass that changed nothing in place."""
        versions, self._versions = self._versions, []
        if any(_version(one) != version for one, version in versions):
            self.failed = IN_PLACE.format(self._kinds)
        self._is_active = self._is_active or bool(versions)

    def evidence(self) -> tuple[bool, str]:
        recomputed, count = self._runs - self._calls, len(self._blocks)
        text = f"{recomputed} recomputations in {self._calls} calls of {count} {self._kinds}."
        return recomputed > 0, text


def _repeated(nn: Any, model: Any) -> list[Any]:
    """Return the outermost modules with children that repeat in a ModuleList or Sequential."""
    found: list[Any] = []
    inside: set[int] = set()
    for container in model.modules():
        if id(container) in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        inner = [one for one in container.children() if next(one.children(), None) is not None]
        for kind in dict.fromkeys(map(type, inner)):
            blocks: list[Any] = [one for one in inner if type(one) is kind]
            if len(blocks) >= MIN_BLOCKS:
                found += blocks
                inside |= {id(module) for block in blocks for module in block.modules()}
    return found


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _state(block: Any) -> list[tuple[str, Any]]:
    """Return the values that a call of a block may change, each with what that call does."""
    legacy: Any = np.random.get_state()
    _, keys, *position = legacy
    found: list[tuple[str, Any]] = [
        ("draws numbers from random", repr(random.getstate())),
        ("draws numbers from numpy.random", keys.tobytes() + repr(position).encode()),
    ]
    for module in block.modules():
        for name, value in {**module._buffers, **module._parameters, **vars(module)}.items():
            found.append((f"changes {name}", value))
            if isinstance(value, sys.modules["torch"].Tensor):
                found.append((f"changes {name}", _version(value)))
            elif isinstance(value, (dict, list, set, deque)):
                found.append((f"changes {name}", len(value)))
    return found


def _changed(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> str | None:
    """Return the name of the first value that another object or number replaces, or None."""
    for (name, one), (other, two) in zip_longest(before, after, fillvalue=("", None)):
        is_equal = type(one) is type(two) and type(one) in _PLAIN and one == two
        if name != other or one is not two and not is_equal:
            return other or name
    return None


def _flat(values: tuple[Any, ...]) -> list[Any]:
    """Return the items of nested tuples; lists are not flattened, as a block may change them."""
    return [item for one in values for item in (_flat(one) if type(one) is tuple else (one,))]
