"""A thread in each process of a job on several hosts: how far is this host's clock from rank 0's?

The first process of each host writes its time into a file of the run folder and reads those of the
others, some times a second; its other processes read what came of it. No training thread waits.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from pathlib import Path

from stepscope.common.clock import clock
from stepscope.recording.recorder import Recorder
from stepscope.run.clocks import Bounds, ClockOffset, offset_between, read_clocks, write_clock
from stepscope.run.rank_files import UNREADABLE, read_run_json

log = logging.getLogger(__name__)

PERIODS_S = (0.25, 1.0)
"""Mean time between two looks in the first FAST_S seconds, and later: a look takes 0.3 ms."""
FAST_S = 60.0
ALONE_S = 600.0
"""Without another host in the folder by then, nobody is waited for any more."""


class ClockExchange:
    """Finds this host's offset and describes it in the rank's file until `close`.

    `writes` is true for one process of each host.
    """

    def __init__(self, recorder: Recorder, *, writes: bool) -> None:
        self._recorder = recorder
        self._folder = recorder.folder
        self._writes = writes
        self._host = socket.gethostname()
        self._bounds: dict[str, Bounds] = {}
        self._reference: str | None = None
        self._said: ClockOffset | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepscope-clock", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End; at most one look is waited for."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def _work(self) -> None:
        begun = time.monotonic()
        while not self._closing.is_set():
            try:
                others = self._look()
            except Exception as error:  # noqa: BLE001 - an offset is not worth a training
                log.warning("stepscope: the clocks of the hosts are not compared: %s", error)
                return
            age_s = time.monotonic() - begun
            if not others and age_s > ALONE_S:
                return
            # Not in step with the other hosts: at times one reads just after another has written.
            period_s = PERIODS_S[0 if age_s < FAST_S else 1]
            self._closing.wait(period_s * random.uniform(0.5, 1.5))

    def _look(self) -> int:
        """Exchange once; return how many other hosts there are."""
        said = read_clocks(self._folder)
        now = clock.now()
        others = {host: content for host, content in said.items() if host != self._host}
        if self._writes:
            for host, content in others.items():
                self._bounds.setdefault(host, Bounds()).add(float(content["sent"]), now)
            seen = {host: bounds.best for host, bounds in self._bounds.items()}
            write_clock(self._folder, self._host, {"sent": clock.now(), "seen": seen})
        reference = self._reference = self._reference or _host_of_first(self._folder)
        if reference == self._host:
            if others:
                self._say(ClockOffset(0.0, 0.0))
        elif reference in others and self._host in said:
            self._compare(reference, said[self._host], others[reference])
        return len(others)

    def _compare(self, reference: str, own: dict[str, object], other: dict[str, object]) -> None:
        try:
            self._say(offset_between(_seen(own, reference), _seen(other, self._host)))
        except ValueError:
            if reference in self._bounds and self._said is not None:
                self._bounds[reference].clear()

    def _say(self, found: ClockOffset) -> None:
        """Describe it where it is new: closer by a tenth, or another one altogether."""
        said = self._said
        near = said is not None and abs(found.offset_s - said.offset_s) <= said.uncertainty_s
        closer = said is None or found.uncertainty_s < 0.9 * said.uncertainty_s
        if near and not closer:
            return
        self._said = found
        self._recorder.describe(
            clock_offset_s=found.offset_s, clock_uncertainty_s=found.uncertainty_s
        )


def _seen(content: dict[str, object], host: str) -> float | None:
    seen = content.get("seen")
    bound = seen.get(host) if isinstance(seen, dict) else None
    return float(bound) if isinstance(bound, int | float) else None


def _host_of_first(folder: Path) -> str | None:
    try:
        return str(read_run_json(folder, 0)["host"])
    except UNREADABLE:
        return None  # number 0 has not begun yet
