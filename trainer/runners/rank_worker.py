"""Entry of a rank, started by torchrun:
`python -m trainer.runners.rank_worker RUN_FOLDER [--config FILE_OR_JSON]`.

Without `--config` the settings are read from the run.json that the server has written. After a
failure torchrun restarts all ranks: they record into a new folder and resume from the last
checkpoint (`restart_attempts.py`).

After a signal from torchrun, or its end, no rank stops alone, as the others would wait for it: rank
0 sends the Stop command, and all stop at the same step. The first rank of another node passes the
request on. After a timeout `ShutdownListener` ends the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from stepscope.commands.job_commands import JobCommands
from stepscope.common.files import open_for_append
from stepscope.distributed.rendezvous import LauncherEnv, launch
from stepscope.recorder.recorder import CommandName, Recorder
from stepscope.run import RunStatus, process_identity, rank_file
from stepscope.store import StoreError
from stepscope.store.reader import send_command
from trainer.config import RunConfig
from trainer.runners import restart_attempts as attempts
from trainer.runners.child_process import WORKER_LOG
from trainer.runners.restart_attempts import Restart, RestartAttempt

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
COMPLETE = "complete"  # value of the store instead of a number


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
            if isinstance(recorder.commands, JobCommands):
                recorder.commands.want_stop(reason)
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


def main() -> None:
    """Train as one rank. Ends with os._exit, as nothing may wait for other ranks at exit."""
    options = _options()
    env = launch(os.environ)
    by_page = options.config is None
    number: int | None = env.restarts
    listener = ShutdownListener(env)
    if by_page:
        config = attempts.config_from_run_json(options.folder)
    else:
        is_json = options.config.lstrip().startswith("{")
        text = options.config if is_json else Path(options.config).read_text()
        config = RunConfig.from_dict(json.loads(text))
        # Rank 0 hosts the store, so it stays referenced.
        number, _store = _agreed_number(options.folder, env)
    if number is None:
        os._exit(0)
    this = attempts.attempt(options.folder, number, config)
    restart = None
    if env.rank == 0:
        restart = attempts.begin(this, options.folder / WORKER_LOG, _max_restarts())
    this.folder.mkdir(parents=True, exist_ok=True)
    if by_page:  # rank 0 shares the file with torchrun
        output = open_for_append(this.folder / rank_file(WORKER_LOG, env.rank))
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
    status = _train(this, env, listener, restart)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if status in (RunStatus.FINISHED, RunStatus.STOPPED) else 1)


def _train(
    this: RestartAttempt, env: LauncherEnv, listener: ShutdownListener, restart: Restart | None
) -> RunStatus:
    training = importlib.import_module("trainer.training.train")  # imports torch

    def opened(recorder: Recorder) -> None:
        listener.opened(recorder)
        if env.rank == 0:
            restarts = {"restarts": env.restarts, "max_restarts": _max_restarts()}
            recorder.describe(torchrun=process_identity(os.getppid()) | restarts)
        if restart is not None:
            recorder.describe(**restart.run_json)
            recorder.event("restart", restart.text, **restart.run_json)

    gc.freeze()  # full collections need not visit the imported modules
    status: RunStatus = training.run(this.config, this.folder, opened=opened)
    return status


def _max_restarts() -> int:
    """Return torchrun's option. Raises KeyError if torchrun has not started this process."""
    return int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def _agreed_number(first: Path, env: LauncherEnv) -> tuple[int | None, Any]:
    """Return the number of this attempt, None for a complete job, and the ranks' store.

    Rank 0 finds the number in the run folders: each node's torchrun counts only failures that it
    has seen, and a requeued Slurm job counts from 0. Each attempt has a new store.
    """
    rendezvous = importlib.import_module("torch.distributed").rendezvous
    store, rank, size = next(rendezvous("env://"))
    if rank == 0:
        number = attempts.free_number(first, env.restarts)
        message = attempts.complete(first, number)
        store.set("stepscope/attempt", str(number) if message is None else COMPLETE)
        if message is not None:
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()
    value = store.get("stepscope/attempt").decode()
    if value != COMPLETE:
        return int(value), store
    store.set(f"stepscope/complete{rank}", "")
    if rank == 0:  # this process hosts the store
        store.wait([f"stepscope/complete{other}" for other in range(size)])
    return None, store


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.runners.rank_worker")
    parser.add_argument("folder", type=Path, help="the run's folder, the same on all nodes")
    parser.add_argument("--config", metavar="FILE_OR_JSON", help="settings of the run")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    return options


if __name__ == "__main__":
    main()
