"""How one rank ends when torchrun asks for it, or is gone.

No rank may leave alone: the others would wait for it in a collective. So number 0 asks for Stop as
the page's button does, and all ranks stop at the same step. The first rank of another machine lets
number 0 know, which may not have been told. What cannot stop in time is ended by the thread here,
which needs no step boundary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from stepscope.recorder.recorder import CommandName, Recorder
from stepscope.run import RunStatus
from stepscope.store import StoreError
from stepscope.store.reader import send_command

log = logging.getLogger(__name__)

LOOK_S = 1.0  # Seconds between two looks whether torchrun still runs.
GRACE_S = 20.0  # Time for an orderly stop; torchrun kills a rank 30 s after its SIGTERM.
PEER_GRACE_S = 3.0
"""Time for the end of what a dead rank has left waiting: gloo's collectives end with an error at
once, NCCL's do not."""
EXIT_CODE = 143  # As of a process that SIGTERM has ended.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""torchrun sends its ranks the one that it gets itself, and SIGTERM where a rank has failed."""
SERVER_SIGNAL = signal.SIGHUP
"""By which the page's server ends torchrun, and nobody else does: the ranks tell it from others."""
AFTER_PEER = "Stopped by torchrun: another rank failed."
SERVER_ENDED = "The server was shut down."
TOLD = "torchrun was told to stop."
TOLD_OR_PEER = "torchrun was told to end, or a rank of another machine has failed."
ORPHANED = "The torchrun that started the ranks is gone."


class TorchrunEnv(NamedTuple):
    """The variables that torchrun sets for a process; `local_size` ranks are on this machine."""

    rank: int
    local_rank: int
    local_size: int
    world_size: int
    restarts: int = 0
    max_restarts: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> TorchrunEnv:
        """Read the variables. Raises KeyError where torchrun has not started this process."""
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        return cls(*(int(environ[name]) for name in (*names, *counts)))


class ShutdownListener:
    """One thread that waits for SIGNALS and torchrun's end; make it in the main thread.

    The signals reach it by Python's wakeup pipe: a main thread that waits in a collective would
    never run a handler. `by_page`: a page's server has started torchrun.
    """

    def __init__(self, place: TorchrunEnv, *, by_page: bool) -> None:
        self._place = place
        self._told = TOLD if place.local_size == place.world_size else TOLD_OR_PEER
        self._by_page = by_page
        self._recorder: Recorder | None = None
        self._parent = os.getppid()
        self._heard, heard = os.pipe()
        for end in (self._heard, heard):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._watch, name="stepscope-parent", daemon=True).start()

    def opened(self, recorder: Recorder) -> None:
        """Take the run's recorder: from now on a stop is asked for through its folder."""
        self._recorder = recorder

    def _watch(self) -> None:
        while True:
            if select.select([self._heard], [], [], LOOK_S)[0] and (asked := self._asked_to_end()):
                if SERVER_SIGNAL in asked and self._by_page:
                    return self._end(SERVER_ENDED, peer_gone=False)
                peer_gone = self._peer_gone()
                return self._end(AFTER_PEER if peer_gone else self._told, peer_gone=peer_gone)
            if os.getppid() != self._parent:
                return self._end(ORPHANED, peer_gone=False)

    def _asked_to_end(self) -> set[signal.Signals]:
        """Empty the pipe: any signal with a handler comes through it, a loader's SIGCHLD too."""
        return set(SIGNALS).intersection(os.read(self._heard, select.PIPE_BUF))

    def _end(self, reason: str, *, peer_gone: bool) -> None:
        recorder = self._recorder
        if recorder is not None:
            if self._place.local_rank == 0 and not peer_gone:
                self._ask_stop(recorder, reason)
            time.sleep(PEER_GRACE_S if peer_gone else GRACE_S)
            status = RunStatus.FAILED if peer_gone else RunStatus.STOPPED
            recorder.close(status, reason)
        os._exit(EXIT_CODE)

    def _ask_stop(self, recorder: Recorder, reason: str) -> None:
        """Ask all ranks to stop; of a machine without rank 0, by way of that one."""
        if self._place.rank != 0:
            if recorder.job is not None:
                recorder.job.want_stop(reason)
            return
        try:
            send_command(recorder.folder, CommandName.STOP, {"reason": reason})
        except StoreError as error:
            log.warning("the ranks could not be asked to stop: %s", error)

    def _peer_gone(self) -> bool:
        """Say whether torchrun has fewer ranks here than it has started."""
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(self._parent).children()
            alive = [one for one in ranks if one.status() != psutil.STATUS_ZOMBIE]
            return len(alive) < self._place.local_size
        return False


def _forget() -> None:
    """In a forked child, such as a loader's worker: a signal to it is not one to the rank."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
