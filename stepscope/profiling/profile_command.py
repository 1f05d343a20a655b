"""The command PROFILE: record the next steps of a training with torch's profiler.

command ─> profiled steps ─> trace and summary ─> result
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepscope.common.files import atomic_write
from stepscope.common.formatting import format_bytes
from stepscope.common.json_values import first_line
from stepscope.profiling import summary_name, trace_name
from stepscope.profiling.summary import summarize, to_json
from stepscope.profiling.torch_profiler import ProfilerCapture, ProfilerUnavailableError, why_not
from stepscope.store.recorder import Command, Recorder

log = logging.getLogger(__name__)

STEPS, STEPS_LIMIT = 5, 50  # Default and maximum number of profiled steps.
PROFILE_S = 10.0
"""Maximum duration, after which a profile ends at the first step boundary: torch sums up its events
in the training thread."""
_NOT_BEGUN = "Profile: the run ended before it began"


@dataclass(slots=True)
class _Profile:
    command: Command
    wanted: int
    step: int
    done: int = 0  # Number of complete profiled steps.
    capture: ProfilerCapture | None = None
    began_s: float = 0.0
    first: int = 0
    held_s: float = 0.0  # Time for which training was paused.

    def start(self, *, cuda: bool) -> None:
        """Start to record. Raises whatever torch raises."""
        called_s = time.perf_counter()
        self.capture = ProfilerCapture(cuda=cuda)
        self.first = self.step + 1
        self.began_s = time.perf_counter()
        self.held_s = self.began_s - called_s

    def text(self, size: int) -> str:
        """Return the result of the command; `size` is the bytes of the trace."""
        early = None if self.capture is None else self.capture.ended_early
        if early is None and self.done < self.wanted:
            early = f"a profile ends after {PROFILE_S:g} s"
        text = f"Profile: step {self.first}"
        if self.last != self.first:
            text = f"Profile: steps {self.first} to {self.last}"
        text += f"; training paused for {self.held_s:.2f} s"
        if early is not None:
            text += f"; it ended early: {early}"
        return f"{text}; trace of {format_bytes(size)}"

    @property
    def last(self) -> int:
        """The last step, or the first one if that did not end."""
        return self.first + max(0, self.done - 1)

    @property
    def is_over(self) -> bool:
        """True if the steps are complete, or have taken PROFILE_S."""
        recorded_s = time.perf_counter() - self.began_s
        return self.done >= self.wanted or (self.done > 0 and recorded_s > PROFILE_S)


@dataclass(eq=False)
class ProfileCommand:
    """Executes one profile at a time. Training thread only, except `active`.

    The thread that started a profile must stop it. `ended_here`: the training thread always calls
    `close`; otherwise only the main thread can profile.
    """

    recorder: Recorder
    step: Callable[[], int]  # Returns the last step.
    on_gpu: Callable[[], bool]  # Returns True if training is on CUDA.
    ended_here: bool
    active: bool = False  # While it is True, each step boundary calls `reach` and `leave`.
    _profile: _Profile | None = None

    def ask(self, command: Command) -> None:
        """Begin a profile, or refuse the command with a reason."""
        wanted = command.args.get("steps", STEPS)
        if (refused := self._refusal(wanted)) is not None:
            self.recorder.finish(command, f"Profile: {refused}", ok=False)
            return
        self._profile = _Profile(command, wanted, self.step())
        self.active = True
        self.leave()

    def reach(self) -> float:
        """Start or end the profile if due at this step boundary; return the seconds it took."""
        profile, now_s = self._profile, time.perf_counter()
        if profile is None:
            return 0.0
        step = self.step()
        is_step = step > profile.step
        profile.step = step
        if profile.capture is None:
            if not is_step:
                return 0.0
            self._tried(profile, lambda: profile.start(cuda=self.on_gpu()))
        else:
            profile.done += is_step
            if not (profile.capture.must_end or profile.is_over):
                return 0.0
            self._tried(profile, lambda: self._end(profile))
        return time.perf_counter() - now_s

    def leave(self) -> None:
        """Request a boundary after the next step."""
        self.recorder.request_boundary()

    def interrupt(self, reason: str) -> None:
        """End a recording in progress early, for this reason."""
        profile = self._profile
        if profile is not None and profile.capture is not None:
            self._tried(profile, lambda: self._end(profile, reason))

    def close(self) -> None:
        """End the profile at the end of the run, with the recorded steps."""
        self.interrupt("the run ended")
        if self._profile is not None:
            self._finish(self._profile, _NOT_BEGUN, ok=False)

    def _refusal(self, wanted: Any) -> str | None:
        if type(wanted) is not int or not 1 <= wanted <= STEPS_LIMIT:
            return f"steps must be a whole number from 1 to {STEPS_LIMIT}, got {wanted!r:.40}"
        if self._profile is not None:
            return "one is being taken already"
        if not self.ended_here and threading.current_thread() is not threading.main_thread():
            return "this script trains in another thread, whose end in a profile would crash it"
        return why_not()

    def _end(self, profile: _Profile, early: str | None = None) -> None:
        """Stop recording, and write the trace and its summary."""
        capture, began_s = profile.capture, time.perf_counter()
        assert capture is not None
        capture.stop(early)
        if capture.running:  # this is not its thread
            return
        folder, rank = self.recorder.folder, self.recorder.number
        trace = folder / trace_name(profile.first, profile.last, rank)
        summary = folder / summary_name(profile.first, profile.last, rank)
        averages = capture.write(trace)
        atomic_write(summary, to_json(summarize(averages, first=profile.first, last=profile.last)))
        profile.held_s += time.perf_counter() - began_s
        size = trace.stat().st_size
        self._finish(
            profile,
            profile.text(size),
            ok=True,
            path=trace.name,
            summary=summary.name,
            bytes=size,
        )

    def _finish(self, profile: _Profile, text: str, *, ok: bool, **data: str | int) -> None:
        self._profile, self.active = None, False
        self.recorder.finish(
            profile.command,
            text,
            ok=ok,
            first=profile.first,
            last=profile.last,
            held_s=round(profile.held_s, 3),
            **data,
        )

    def _tried(self, profile: _Profile, do: Callable[[], None]) -> None:
        """Call `do`; an exception fails the profile, never the training."""
        try:
            do()
        except Exception as error:  # torch's own, the disk's
            is_known = isinstance(error, ProfilerUnavailableError)
            log.warning("stepscope: the profile failed", exc_info=not is_known)
            kind = "" if is_known else f"{type(error).__name__}: "
            self._finish(profile, f"Profile: failed ({kind}{first_line(error)})", ok=False)
            with contextlib.suppress(Exception):  # what failed once may fail again
                if profile.capture is not None:
                    profile.capture.stop()
