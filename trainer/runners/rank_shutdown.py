"""Shutdown of a rank after a signal from torchrun, or after the end of torchrun.

A rank must not stop alone, as the others would wait for it in a collective. So rank 0 sends the
Stop command, and all ranks stop at the same step. The first rank of another node passes the request
to rank 0. After a timeout the thread of this module ends the rank without a step boundary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time

import psutil

from stepscope.distributed.rendezvous import LauncherEnv
from stepscope.recorder.recorder import CommandName, Recorder
from stepscope.run import RunStatus
from stepscope.store import StoreError
from stepscope.store.reader import send_command

log = logging.getLogger(__name__)

POLL_S = 1.0  # interval of the check whether torchrun runs
GRACE_S = 20.0  # time for an orderly stop; torchrun kills a rank 30 s after its SIGTERM
PEER_GRACE_S = 3.0  # time for gloo's collectives to fail after a rank has died; NCCL's do not fail
EXIT_CODE = 143  # of a process that SIGTERM has ended
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""torchrun forwards these signals to its ranks, and sends SIGTERM if a rank has failed."""
AFTER_PEER = "Stopped by torchrun: another rank failed."
SIGNALED = "torchrun was stopped by the server, by a signal, or by a failure on another node."
ORPHANED = "The torchrun that started the ranks is gone."


class ShutdownListener:
    """A thread that waits for SIGNALS and the end of torchrun; created in the main thread.

    Python's wakeup pipe delivers the signals: a main thread inside a collective runs no handler.
    """

    def __init__(self, place: LauncherEnv) -> None:
        self._place = place
        self._recorder: Recorder | None = None
        self._parent = os.getppid()
        self._pipe, wakeup = os.pipe()
        for end in (self._pipe, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_reset_signals)
        threading.Thread(target=self._watch, name="stepscope-parent", daemon=True).start()

    def opened(self, recorder: Recorder) -> None:
        """Set the recorder of the run, whose folder receives the Stop command."""
        self._recorder = recorder

    def _watch(self) -> None:
        while True:
            # Every signal with a handler comes through the pipe, also a loader's SIGCHLD.
            if select.select([self._pipe], [], [], POLL_S)[0] and (
                set(SIGNALS).intersection(os.read(self._pipe, select.PIPE_BUF))
            ):
                if self._peer_gone():
                    return self._end(AFTER_PEER, peer_gone=True)
                return self._end(SIGNALED)
            if os.getppid() != self._parent:
                return self._end(ORPHANED)

    def _end(self, reason: str, *, peer_gone: bool = False) -> None:
        recorder = self._recorder
        if recorder is not None:
            if self._place.local_rank == 0 and not peer_gone:
                self._send_stop(recorder, reason)
            time.sleep(PEER_GRACE_S if peer_gone else GRACE_S)
            recorder.close(RunStatus.FAILED if peer_gone else RunStatus.STOPPED, reason)
        os._exit(EXIT_CODE)

    def _send_stop(self, recorder: Recorder, reason: str) -> None:
        """Send the Stop command to all ranks, from another node through rank 0."""
        if self._place.rank != 0:
            if recorder.job is not None:
                recorder.job.want_stop(reason)
            return
        try:
            send_command(recorder.folder, CommandName.STOP, {"reason": reason})
        except StoreError as error:
            log.warning("the Stop command could not be sent: %s", error)

    def _peer_gone(self) -> bool:
        """Return True if torchrun has fewer live ranks on this node than it started."""
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(self._parent).children()
            alive = [rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE]
            return len(alive) < (self._place.local_world_size or 1)
        return False


def _reset_signals() -> None:
    """Restore default signals in a forked child, such as a DataLoader worker."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
