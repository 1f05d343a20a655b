"""Entry of a rank, started by torchrun:
`python -m trainer.runners.rank_worker RUN_FOLDER [--config FILE_OR_JSON]`.

Without `--config` the settings are read from the run.json that the server has written. After a
failure torchrun restarts all ranks: they record into a new folder and resume from the last
checkpoint (`restart_attempts.py`).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from stepscope.common.files import open_for_append
from stepscope.distributed.rendezvous import LauncherEnv, launch
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus, process_identity, rank_file
from trainer.config import RunConfig
from trainer.runners import restart_attempts as attempts
from trainer.runners.process import WORKER_LOG
from trainer.runners.rank_shutdown import ShutdownListener
from trainer.runners.restart_attempts import Restart, RestartAttempt

COMPLETE = "complete"  # value of the store instead of a number


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
    if by_page:
        _redirect_output(this.folder / rank_file(WORKER_LOG, env.rank))
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
            recorder.describe(torchrun=_torchrun(env))
        if restart is not None:
            recorder.describe(**restart.run_json)
            recorder.event("restart", restart.text, **restart.run_json)

    gc.freeze()  # full collections need not visit the imported modules
    status: RunStatus = training.run(this.config, this.folder, opened=opened)
    return status


def _torchrun(env: LauncherEnv) -> dict[str, Any]:
    """Return the identity of the parent torchrun for run.json."""
    restarts = {"restarts": env.restarts, "max_restarts": _max_restarts()}
    return process_identity(os.getppid()) | restarts


def _max_restarts() -> int:
    """Return torchrun's option. Raises KeyError if torchrun has not started this process."""
    return int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def _agreed_number(first: Path, env: LauncherEnv) -> tuple[int | None, Any]:
    """Return the number of this attempt, None for a complete job, and the ranks' store.

    Rank 0 finds the number in the run folders: each node's torchrun counts only failures that it
    has seen, and a requeued Slurm job counts from 0. Each attempt has a new store
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE, `trainer/launch_commands.py`).
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


def _redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this process to a file; rank 0 shares it with torchrun."""
    output = open_for_append(path)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)


if __name__ == "__main__":
    main()
