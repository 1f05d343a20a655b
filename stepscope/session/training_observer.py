"""Observe a training beside its metrics, and write what was seen into the run folder."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import atomic_write
from stepscope.session.code_sampler import CodeSampler, TrainingThread
from stepscope.session.training_facts import WRITE_S, Compilation, TrainingFacts, facts_file

log = logging.getLogger(__name__)

SWITCH = "STEPSCOPE_CODE_LINES"
"""Environment variable; "off" disables the sampling of Python stacks."""
MAX_COMPILATIONS = 20  # that are kept with their reason
MAX_REASON = 300


class TrainingObserver:
    """Facts of one process. `observe` runs in the sampler's thread; hooks add to `facts`.

    The hooks' objects in `facts` belong to the training thread: a file may show one step of them
    more in one number than in another.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thread = TrainingThread()
        self.facts = TrainingFacts()
        self._file = facts_file(folder, number)
        self._step = step
        self._clock = clock
        self._code = None
        if os.environ.get(SWITCH) != "off":
            self._code = CodeSampler(self.thread, step, clock)
        self._write_at = clock()
        self._written = b""
        self._newest_compilation = 0

    def sample_code(self, late_s: float) -> None:
        """Take one sample, whose time was `late_s` ago."""
        if self._code is not None:
            self._code.tick(late_s)

    def observe(self, _values: Mapping[str, float]) -> None:
        """Write the facts if they are due."""
        now = self._clock()
        if now >= self._write_at:
            self._write_at = now + WRITE_S
            self.write()

    def write(self) -> None:
        """Replace the file if the facts have changed; logs an error of the disk."""
        self._find_compilations()
        if self._code is not None:
            self.facts.periods, self.facts.lines = self._code.results()
        content = msgspec.json.encode(self.facts)
        if content == self._written or content == _EMPTY:
            return
        try:
            atomic_write(self._file, content, durable=False)
            self._written = content
        except OSError as error:
            log.debug("stepscope: %s could not be written: %s", self._file.name, error)

    def _find_compilations(self) -> None:
        """Add the compilations that torch has counted since the last call."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return
        # Private names of torch, which another version may not have.
        with suppress(AttributeError, KeyError, TypeError):
            found = int(utils.counters["stats"]["unique_graphs"])
            facts = self.facts
            if found == facts.compilation_count:
                return
            facts.compilation_count = found
            for metrics in utils.get_compilation_metrics():
                began = int(metrics.start_time_us)
                if began <= self._newest_compilation or metrics.co_name is None:
                    continue
                self._newest_compilation = began
                reason = str(metrics.recompile_reason or "")[:MAX_REASON]
                facts.compilations.append(Compilation(step=self._step(), reason=reason))
            del facts.compilations[:-MAX_COMPILATIONS]


_EMPTY = msgspec.json.encode(TrainingFacts())
