"""Observe at sampled steps whether a training can learn: gradients, eval mode, the first NaN.

Nothing here waits for a GPU: there only what Python knows of a tensor is read.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from stepscope.common.stack_phases import is_own_file
from stepscope.memory.model_states import ModelStateTracker
from stepscope.session.training_facts import LearningFacts, NonFinite, TrainingFacts

FIRST_CHECKS = 16  # Steps from the first that are checked, then one in INTERVAL_S.
INTERVAL_S = 1.0
MAX_SUMMED = 10**6  # elements of a gradient
DEPENDS_ON_MODE = ("dropout", "batchnorm", "instancenorm")
"""Modules of torch whose modules compute otherwise in eval mode."""


class LearningObserver:
    """Checks the first optimizer of a script. Training thread only."""

    def __init__(self, facts: TrainingFacts, modules: ModelStateTracker) -> None:
        self._facts = facts
        self._modules = modules
        self._optimizer: weakref.ref[Any] | None = None
        self._learning = LearningFacts()
        self.due_s = -math.inf
        """Time from which the next step is checked."""
        self._without: set[int] | None = None
        """The `id`s of parameters that had no gradient in any check."""
        self._held: list[tuple[Any, int, float | None]] = []
        """Parameters with the version and sum of the gradient that the checked step used."""
        self._backwards = 0  # since the checked step
        self._cleared: bool | None = False  # None if unknown
        self._batch: list[weakref.ref[Any]] = []
        self._batch_number = 0

    def made(self, optimizer: Any) -> None:
        """Note the first optimizer of the script, and the line that made it."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
            self._learning.built = _line_of_script()

    def batch_fetched(self, batch: Any, number: int) -> None:
        """Remember the newest batch and its index in the pass, without keeping it in memory."""
        self._batch_number = number - 1
        parts = batch.values() if isinstance(batch, dict) else batch
        tensors = parts if isinstance(batch, (list, tuple, dict)) else (batch,)
        self._batch = [weakref.ref(one) for one in tensors if hasattr(one, "untyped_storage")]

    def after_step(self, optimizer: Any, now_s: float) -> None:
        """Check the gradients that the step used, and the mode of the modules."""
        learning = self._learning
        is_first = self._optimizer is not None and optimizer is self._optimizer()
        if not is_first:
            return
        self._count_clearing()
        if now_s < self.due_s:
            return
        learning.checks += 1
        if learning.checks >= FIRST_CHECKS:
            self.due_s = now_s + INTERVAL_S
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        without = {id(parameter) for parameter in parameters if parameter.grad is None}
        self._without = without if self._without is None else self._without & without
        learning.parameters = len(parameters)
        learning.without_gradient = len(self._without)
        is_in_eval_mode = self._is_in_eval_mode(parameters)
        learning.in_eval_mode = learning.in_eval_mode + 1 if is_in_eval_mode else 0
        given = [parameter for parameter in parameters if parameter.grad is not None]
        self._held = [(p, p.grad._version, _sum(p.grad)) for p in (*given[:1], *given[-1:])]
        self._facts.learning = learning

    @property
    def holds_gradients(self) -> bool:
        """True after a check, until the next step of the optimizer."""
        return bool(self._held)

    def before_backward(self) -> None:
        """Check whether the gradients of the last step are cleared before new ones are added.

        A later backward() may be that of the step, as where two networks take turns.
        """
        self._backwards += 1
        if self._cleared:
            return
        sums = [None if p.grad is None else _sum(p.grad) for p, _, _ in self._held]
        if any(p.grad is None for p, _, _ in self._held) or 0.0 in sums:
            self._cleared = True
        elif self._backwards == 1:
            # Clearing by hand, through `grad.data`, does not raise the version.
            self._cleared = any(
                parameter.grad._version != version or total != used
                for (parameter, version, used), total in zip(self._held, sums, strict=True)
            )
        elif None in sums:
            self._cleared = None

    def _count_clearing(self) -> None:
        """Count what the backward() calls since the checked step have shown."""
        if self._backwards and self._cleared is not None:
            self._learning.clear_checks += 1
            self._learning.never_cleared += not self._cleared
        self._held = []
        self._backwards = 0
        self._cleared = False

    def loss_not_finite(self, step: int) -> None:
        """Find what else is not finite, at the first such loss on the CPU, before its step."""
        if self._facts.non_finite is not None:
            return
        found = self._facts.non_finite = NonFinite(step=step)
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            found.weights = not_finite(weights)
        batch = [reference() for reference in self._batch]
        if self._batch:
            found.batch = self._batch_number
        if batch and None not in batch:
            found.inputs = not_finite(batch)

    def _is_in_eval_mode(self, parameters: list[Any]) -> bool:
        """Return True if all known modules are in eval mode, and one depends on it.

        False if no module has one of `parameters`, as where an input is optimized.
        """
        modules = self._modules.modules()
        if not modules or any(getattr(module, "training", True) for module in modules):
            return False
        trained = {id(parameter) for parameter in parameters}
        if not any(id(one) in trained for module in modules for one in module._parameters.values()):
            return False
        return any(
            kind.__module__.rpartition(".")[2] in DEPENDS_ON_MODE
            for module in modules
            for kind in type(module).__mro__
        )


def not_finite(tensors: Iterable[Any]) -> bool | None:
    """Return whether a CPU tensor has a NaN or an infinity; None if one is on another device."""
    isfinite = sys.modules["torch"].isfinite
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
        if tensor.is_floating_point() and not bool(isfinite(tensor.detach()).all()):
            return True
    return False


def _sum(gradient: Any) -> float | None:
    """Return the sum of absolute values of a small gradient on the CPU."""
    if not gradient.is_cpu or gradient.is_sparse or gradient.numel() > MAX_SUMMED:
        return None
    return float(gradient.detach().abs().sum())


def _line_of_script() -> str:
    """Return the file and line of the innermost frame of the script."""
    frame = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
