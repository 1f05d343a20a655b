"""Sample what the training thread executes: the line of the script, its phase, and its CPU time.

The sampler's thread calls `tick` ten times a second. A tick walks the thread's Python stack once
(some 10 us) and reads numbers of the kernel; it calls nothing of torch. Samples count once a
later step has ended, so that what follows the last step does not count.

Python's lock (GIL) delays a sample while the thread runs Python code, until a call releases the
lock or the switch interval (5 ms) has passed. A call that released it is not what was sampled: that
is the Python code up to it.
"""

from __future__ import annotations

import itertools
import linecache
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType

from stepscope.common.stack_phases import (
    BACKWARD,
    FORWARD,
    INPUT,
    OPTIMIZER,
    PACKAGE,
    frame_phase,
    is_own_file,
)
from stepscope.session.training_facts import MAX_LINES, MAX_PERIODS, CodeLine, Period

FIRST_STEP = 3  # Samples before it are of imports, first kernels and the first compilation.
MAX_DEPTH = 200  # frames of one stack
MAX_PLACES = 1000
MAX_TEXT = 100
MIN_LATE_S = 2e-4
"""Delay of a sample by the GIL. Without it 75% of the samples come within 0.15 ms of their time."""
OWN_CODE, VALIDATION = "own code", "validation"
PHASE_NAMES = {INPUT: "data", FORWARD: FORWARD, BACKWARD: BACKWARD, OPTIMIZER: OPTIMIZER}
_WRAPPERS = ("_wrapped_call_impl", "_call_impl")
_NO_COMPUTING = ("/torch/utils/tensorboard/", "/torch/utils/data/", "/torch/serialization.py")


@dataclass(slots=True)
class TrainingThread:
    """The thread that trains, and the phase of its step where hooks know it, else ""."""

    ident: int = 0
    native_id: int = 0
    phase: str = ""

    def claim(self) -> None:
        """Make the calling thread the training thread."""
        if self.ident != threading.get_ident():
            self.ident = threading.get_ident()
            self.native_id = threading.get_native_id()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample found the thread: the call in the script, and the code that it had called."""

    phase: str
    code: CodeType
    instruction: int
    below: CodeType | None
    in_torch: bool
    before: bool


@dataclass(slots=True)
class _Code:
    """What the file of a code object says of a frame."""

    is_own: bool
    is_ours: bool  # of Stepscope
    is_generated: bool  # calls a file that torch.compile has written
    is_wrapper: bool  # only calls the function whose name a reader knows
    phase: str | None
    in_torch: bool


@dataclass(slots=True)
class PlaceCount:
    """Samples of one place, by period, and how much of the time before them was asleep."""

    counts: dict[int, int] = field(default_factory=dict)
    asleep: float = 0.0


class CodeSampler:
    """Counts samples of the training thread by place. Sampler thread only.

    `step` returns the latest step.
    """

    def __init__(
        self,
        thread: TrainingThread,
        step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._step = step
        self._clock = clock
        self._folder = Path.cwd()  # Files in it are named without it.
        self._codes: dict[CodeType, _Code] = {}
        self._places: dict[Place, PlaceCount] = {}
        self._periods: list[Period] = []
        self._samples_in_period = 4  # doubled when periods are merged
        self._pending = Period(step=0)
        self._pending_places: list[tuple[Place, float]] = []
        self._last: tuple[float, float, float] | None = None
        """Time, and seconds on a core and without one, at the last tick."""
        self._own_delay_s = 0.0  # of the sampler's thread, without a core

    def tick(self, late_s: float = 0.0) -> None:
        """Take one sample of the training thread, whose time was `late_s` ago."""
        thread = self._thread
        step = self._step()
        if not thread.ident or step < FIRST_STEP:
            return
        # First: each read below releases the GIL, and the thread continues.
        place = self._place(thread)
        asleep = self._read_times(thread.native_id)
        late_s -= self._read_own_delay()
        is_before = MIN_LATE_S <= late_s < sys.getswitchinterval()
        if step > self._pending.step:
            self._close_pending(step)
        self._pending.samples += 1
        if place is not None:
            place = replace(place, before=is_before)
            self._pending_places.append((place, asleep))

    def results(self) -> tuple[list[Period], list[CodeLine]]:
        """Return the periods, and the lines with the most samples."""
        periods = list(self._periods)
        ordered = sorted(self._places.items(), key=lambda item: -sum(item[1].counts.values()))
        lines: dict[tuple[str, str, int, str, str, bool], CodeLine] = {}
        for place, count in ordered[: 2 * MAX_LINES]:
            line = describe(place, self._folder)
            key = (line.phase, line.file, line.line, line.call, line.below, line.before)
            line = lines.setdefault(key, line)
            line.counts = line.counts or [0] * len(periods)
            for period, number in count.counts.items():
                line.counts[period] += number
            line.asleep += count.asleep
        return periods, list(lines.values())[:MAX_LINES]

    def _read_times(self, native_id: int) -> float:
        """Add the thread's times since the last tick; return the fraction that it was asleep."""
        now = self._clock()
        scheduled = thread_times(native_id)
        if scheduled is None:
            self._last = None
            return 0.0
        times = now, *scheduled
        last = self._last
        self._last = times
        if last is None or now <= last[0]:
            return 0.0
        wall_s, cpu_s, delay_s = (new - old for new, old in zip(times, last, strict=True))
        self._pending.wall_s += wall_s
        self._pending.delay_s += delay_s
        return min(1.0, max(0.0, 1.0 - (cpu_s + delay_s) / wall_s))

    def _read_own_delay(self) -> float:
        """Return how long the calling thread was without a core since the last call."""
        scheduled = thread_times(threading.get_native_id())
        if scheduled is None:
            return math.inf
        before_s = self._own_delay_s
        self._own_delay_s = scheduled[1]
        return scheduled[1] - before_s

    def _close_pending(self, step: int) -> None:
        """Count what was sampled since the last step."""
        pending = self._pending
        places = self._pending_places
        self._pending = Period(step=step)
        self._pending_places = []
        if not pending.samples:
            return
        periods = self._periods
        if not periods or periods[-1].samples >= self._samples_in_period:
            if len(periods) == MAX_PERIODS:
                self._merge_periods()
            periods.append(Period(step=step))
        period = periods[-1]
        period.step = step
        period.samples += pending.samples
        period.wall_s += pending.wall_s
        period.delay_s += pending.delay_s
        number = len(periods) - 1
        for place, asleep in places:
            count = self._places.get(place)
            if count is None:
                if len(self._places) >= MAX_PLACES:
                    continue
                count = self._places[place] = PlaceCount()
            count.counts[number] = count.counts.get(number, 0) + 1
            count.asleep += asleep

    def _merge_periods(self) -> None:
        """Merge each period with the next; from now on a period has twice the samples."""
        self._samples_in_period *= 2
        self._periods[:] = [
            Period(
                step=second.step,
                samples=first.samples + second.samples,
                wall_s=first.wall_s + second.wall_s,
                delay_s=first.delay_s + second.delay_s,
            )
            for first, second in zip(self._periods[::2], self._periods[1::2], strict=True)
        ]
        for count in self._places.values():
            merged: dict[int, int] = {}
            for number, samples in count.counts.items():
                merged[number // 2] = merged.get(number // 2, 0) + samples
            count.counts = merged

    def _place(self, thread: TrainingThread) -> Place | None:
        """Return where the thread is; None without a frame of the script."""
        # No frame may be kept: it holds the tensors of its function.
        frame = sys._current_frames().get(thread.ident)
        below: CodeType | None = None
        in_torch = False
        phases: list[str] = []
        own: tuple[CodeType, int] | None = None
        for code, instruction in _frames(frame):
            known = self._known(code)
            if known.phase is not None:
                phases.append(known.phase)
            if known.is_generated:
                own = None  # A file that torch.compile has written looks like the script's.
            if known.is_ours or own is not None:
                continue
            if known.is_own:
                own = code, instruction
            else:
                if below is None or not known.is_wrapper:
                    below = code
                in_torch = in_torch or known.in_torch
        if own is None:
            return None
        return Place(_phase(thread.phase, phases), *own, below, in_torch, before=False)

    def _known(self, code: CodeType) -> _Code:
        known = self._codes.get(code)
        if known is None:
            file = code.co_filename
            known = self._codes[code] = _Code(
                is_own=is_own_file(file),
                is_ours=file.startswith(PACKAGE),
                is_generated="/torch/_inductor/" in file,
                is_wrapper="<locals>" in code.co_qualname or code.co_name in _WRAPPERS,
                phase=PHASE_NAMES.get(frame_phase(file, code.co_name) or ""),
                in_torch="/torch/" in file and not any(part in file for part in _NO_COMPUTING),
            )
        return known


def thread_times(native_id: int) -> tuple[float, float] | None:
    """Return the seconds of a thread on a core, and ready to run without one; None if unknown."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            cpu_ns, delay_ns, _ = file.read().split()
    except (OSError, ValueError):  # the thread has ended, or the kernel does not count
        return None
    return int(cpu_ns) / 1e9, int(delay_ns) / 1e9


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and instruction of each frame, the innermost first."""
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        yield frame.f_code, frame.f_lasti
        frame = frame.f_back


def _phase(by_hooks: str, by_frames: list[str]) -> str:
    """Return the phase of a sample; a forward pass inside backward() is recomputation."""
    if by_hooks:
        return by_hooks
    if not by_frames:
        return ""
    is_recomputed = by_frames[0] == FORWARD and BACKWARD in by_frames
    return BACKWARD if is_recomputed else by_frames[0]


def describe(place: Place, folder: Path) -> CodeLine:
    """Return a place as a line of source, without counts; its file relative to `folder`."""
    file = place.code.co_filename
    shown = Path(file)
    shown = shown.relative_to(folder) if shown.is_relative_to(folder) else Path(*shown.parts[-2:])
    positions = next(
        itertools.islice(place.code.co_positions(), place.instruction // 2, None),
        (None, None, None, None),
    )
    line, end_line, column, end_column = positions
    number = line or place.code.co_firstlineno
    text = linecache.getline(file, number).rstrip("\n")
    call = ""
    if column is not None:
        # Columns count bytes of UTF-8.
        encoded = text.encode()
        end = end_column if end_line == line else None
        call = encoded[column:end].decode(errors="replace")
    below = place.below
    return CodeLine(
        phase=place.phase,
        file=str(shown),
        line=number,
        source=text.strip()[:MAX_TEXT],
        call=call[:MAX_TEXT],
        below="" if below is None else below.co_qualname[:MAX_TEXT],
        in_torch=place.in_torch,
        before=place.before,
        counts=[],
    )
