"""Labels CUDA allocations with the phase of the step, while a history of them is recorded.

torch keeps the text with each allocation of the history (`user_metadata` in a snapshot). Older
versions and builds without CUDA have no place for it; then nothing is labeled.

A text is that of the thread which sets it, and on a GPU autograd computes gradients in a thread of
its own. A hook on a gradient of our own sets the text there: two kernels on one number.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from stepscope.profiling import phase_ranges
from stepscope.profiling.z_phase_names import BACKWARD, DATA, FORWARD, OPTIMIZER

log = logging.getLogger(__name__)

PREFIX = "phase="
"""Begins each label, such as "phase=forward"."""
_AFTER = {DATA: FORWARD, FORWARD: FORWARD, BACKWARD: OPTIMIZER, OPTIMIZER: FORWARD}
"""What follows a phase, until the next one begins: a script names only data and backward."""


class Labels:
    """Labels what is allocated from now on, until `end`; made and ended by the training thread.

    A text that the script has set is put back at the end.
    """

    def __init__(self) -> None:
        memory: Any = sys.modules["torch"].cuda.memory
        self._set: Callable[[str], None] | None = None
        self._thread = threading.get_ident()
        self._is_open = False
        try:
            self._before: str = memory._get_memory_metadata()
            self._set = memory._set_memory_metadata
        except AttributeError:
            return
        phase_ranges.label(self._span)
        self._put_in_backward(f"{PREFIX}{BACKWARD}")
        self.begin_step()

    def begin_step(self) -> None:
        """A step begins: what is allocated now belongs to its forward pass."""
        self._put(FORWARD)

    def end(self) -> None:
        """Label nothing more."""
        if self._set is not None:
            phase_ranges.label(None)
            self._put_in_backward("")
            self._set(self._before)
            self._set = None

    def _span(self, name: str) -> AbstractContextManager[None]:
        if self._is_open or threading.get_ident() != self._thread:
            return nullcontext()
        return self._labeled(name)

    @contextmanager
    def _labeled(self, name: str) -> Iterator[None]:
        self._is_open = True
        self._put(name)
        try:
            yield
        finally:
            self._is_open = False
            self._put(_AFTER[name])

    def _put(self, name: str) -> None:
        if self._set is not None:
            self._set(f"{PREFIX}{name}")

    def _put_in_backward(self, text: str) -> None:
        """Set the text of the thread that computes gradients on the current device."""
        torch, put = sys.modules["torch"], self._set
        if put is None:
            return
        try:
            with torch.inference_mode(False), torch.enable_grad():
                number = torch.zeros((), device="cuda", requires_grad=True)
                product = number * 1
                product.register_hook(lambda gradient: put(text))
                torch.autograd.grad(product, number)
        except Exception:  # a label is not worth the snapshot
            log.warning("stepscope: backward passes are not labeled", exc_info=True)
