"""Activation checkpointing of the repeated blocks of a model."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from stepscope.settings.model import Call, ModelSetting, ReplacedCall
from stepscope.settings.setting import Training

MIN_BLOCKS = 3
IN_PLACE = "An input or buffer of {} changes in place (BatchNorm)."


class Checkpoint(ModelSetting):
    """Replaces the calls of the blocks; the first pass runs as before, and is checked."""

    name = "checkpoint"
    code = (
        "block_output = checkpoint(block, *inputs, use_reentrant=False)  # torch.utils.checkpoint"
    )
    works_in_ddp = True
    _is_active = False
    _calls = 0
    _runs = 0  # of the blocks, with those in backward()

    def problem(self, subject: Training) -> str | None:
        model = subject.model
        self._blocks = _repeated(sys.modules["torch"].nn, model)
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
        """Return the function that replaces the call of a block."""
        torch = sys.modules["torch"]
        call = block._call_impl
        buffers = list(block.buffers())  # not in each call, which takes 0.1 ms
        checkpoint = import_module("torch.utils.checkpoint").checkpoint
        known_kinds = (torch.Tensor, torch.dtype, bool, int, float, str, type(None))

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._runs += 1
            return call(*args, **kwargs)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            before = [_version(buffer) for buffer in buffers]
            result = checkpoint(counted, *args, use_reentrant=False, **kwargs)
            if before != [_version(buffer) for buffer in buffers]:
                self.failed = IN_PLACE.format(self._kinds)
            return result

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self.failed is not None:
                return call(*args, **kwargs)
            values = _flat((*args, *kwargs.values()))
            for value in values:
                if not isinstance(value, known_kinds):
                    kind = type(value).__name__
                    self.failed = (
                        f"{self._kinds} has an input of class {kind}, which it may change."
                    )
                    return call(*args, **kwargs)
            if self._is_active:
                return checkpointed(*args, **kwargs)
            for value in (*values, *buffers):
                if isinstance(value, torch.Tensor):
                    self._versions.append((value, _version(value)))
            return call(*args, **kwargs)

        return forward

    def end_pass(self) -> None:
        """Begin to checkpoint after a first pass that changed nothing in place."""
        if any(_version(tensor) != version for tensor, version in self._versions):
            self.failed = IN_PLACE.format(self._kinds)
        self._is_active = self._is_active or bool(self._versions)
        self._versions.clear()

    def evidence(self) -> tuple[bool, str]:
        recomputed = self._runs - self._calls
        blocks = f"{len(self._blocks)} {self._kinds}"
        return recomputed > 0, f"{recomputed} recomputations in {self._calls} calls of {blocks}."


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


def _flat(values: tuple[Any, ...]) -> list[Any]:
    """Return the items of nested tuples; lists are not flattened, as a block may change them."""
    items: list[Any] = []
    for value in values:
        items += _flat(value) if type(value) is tuple else [value]
    return items
