"""Entry of a rank, started by torchrun: `python -m trainer.runners.rank_worker RUN_FOLDER`.

The settings are read from the run.json that the server has written. After a signal from torchrun,
or the end of torchrun or the server, no rank stops alone, as the others would wait for it: rank 0
sends the Stop command, and all stop at the same step. After a timeout `ShutdownListener` ends the
rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from stepscope.common.files import open_for_append
from stepscope.distributed.rendezvous import LauncherEnv, launch
from stepscope.host.child_process import call_at_end_of
from stepscope.run import RunStatus, rank_file
from stepscope.run.rank_info import read_run_json
from stepscope.store import StoreError
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName, Recorder
from trainer.config import RunConfig
from trainer.runners.child_process import WORKER_LOG

log = logging.getLogger(__name__)

GRACE_S = 20.0  # time for an orderly stop; torchrun kills a rank 30 s after its SIGTERM
PEER_GRACE_S = 3.0  # time for gloo's collectives to fail after a rank has died; NCCL's do not fail
EXIT_CODE = 143  # of a process that SIGTERM has ended
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""torchrun forwards these signals to its ranks, and sends SIGTERM if a rank has failed."""
AFTER_PEER = "Stopped by torchrun: another rank failed."
SIGNALED = "torchrun was stopped by the server or by a signal."
LAUNCHER_GONE = "The server or the torchrun that started the ranks is gone."


class ShutdownListener:
    """Threads that wait for SIGNALS and the end of torchrun and the server.

    Created in the main thread. Python's wakeup pipe delivers the signals: a main thread inside a
    collective runs no handler.
    """

    def __init__(self, place: LauncherEnv) -> None:
        self._place = place
        self._recorder: Recorder | None = None
        self._pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_reset_signals)
        threading.Thread(target=self._watch, name="stepscope-parent", daemon=True).start()
        # torchrun's stdin, which its ranks inherit, is a pipe from the server, which closes it when
        # torchrun has ended.
        call_at_end_of(sys.stdin.fileno(), lambda: self._end(LAUNCHER_GONE))

    def opened(self, recorder: Recorder) -> None:
        """Set the recorder of the run, whose folder receives the Stop command."""
        self._recorder = recorder

    def _watch(self) -> None:
        while True:
            # Every signal with a handler comes through the pipe, also a loader's SIGCHLD.
            if set(SIGNALS).intersection(os.read(self._pipe, 512)):
                if self._peer_gone():
                    return self._end(AFTER_PEER, peer_gone=True)
                return self._end(SIGNALED)

    def _end(self, reason: str, *, peer_gone: bool = False) -> None:
        recorder = self._recorder
        if recorder is not None:
            if self._place.rank == 0 and not peer_gone:
                _send_stop(recorder, reason)
            time.sleep(PEER_GRACE_S if peer_gone else GRACE_S)
            recorder.close(RunStatus.FAILED if peer_gone else RunStatus.STOPPED, reason)
        os._exit(EXIT_CODE)

    def _peer_gone(self) -> bool:
        """Return True if torchrun has fewer live ranks than it started."""
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(os.getppid()).children()
            alive = [rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE]
            return len(alive) < self._place.world_size
        return False


def _send_stop(recorder: Recorder, reason: str) -> None:
    """Send the Stop command to all ranks."""
    try:
        send_command(recorder.folder, CommandName.STOP, {"reason": reason})
    except StoreError as error:
        log.warning("the Stop command could not be sent: %s", error)


def _reset_signals() -> None:
    """Restore default signals in a forked child, such as a DataLoader worker."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def main(folder: Path) -> None:
    """Train as one rank. Ends with os._exit, as nothing may wait for other ranks at exit."""
    env = launch(os.environ)
    listener = ShutdownListener(env)
    config = RunConfig.from_dict(read_run_json(folder, 0)["config"])
    # Rank 0 shares the file with torchrun.
    output = open_for_append(folder / rank_file(WORKER_LOG, env.rank))
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    training = importlib.import_module("trainer.runners.training_run")  # imports torch
    gc.freeze()  # full collections need not visit the imported modules
    status: RunStatus = training.run(config, folder, opened=listener.opened)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if status in (RunStatus.FINISHED, RunStatus.STOPPED) else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
