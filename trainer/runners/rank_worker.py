"""Entry of one rank of a job, which torchrun starts:
`python -m trainer.runners.rank_worker RUN_FOLDER [--config FILE_OR_JSON]`.

Without `--config` the settings stand in the folder's run.json, where the page's runner has put
them. After a failure torchrun starts all ranks again: they record into a folder of their own and
resume from the last checkpoint (`restart_attempts.py`).
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
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus, process_identity, rank_file
from stepscope.run.folder import start_ticks
from trainer.config import RunConfig
from trainer.runners.process import WORKER_LOG
from trainer.runners.rank_shutdown import ShutdownListener, TorchrunEnv
from trainer.runners.restart_attempts import (
    Restart,
    RestartAttempt,
    attempt,
    begin,
    complete,
    config_from_run_json,
    free_number,
)

COMPLETE = "complete"  # What rank 0 tells in place of a number where nothing is left to do.


def main() -> None:
    """Train as one rank; does not return.

    os._exit: nothing may wait at the end of a process whose peers wait for it, or are gone.
    """
    options = _options()
    place = TorchrunEnv.of(os.environ)
    by_page = options.config is None
    ending = ShutdownListener(place, by_page=by_page)
    config = config_from_run_json(options.folder) if by_page else _given(options.config)
    # The store is kept: in rank 0 it has the server at which the others read the number.
    number, _store = (place.restarts, None) if by_page else _agreed_number(options.folder, place)
    if number is None:
        os._exit(0)
    this = attempt(options.folder, number, config)
    restart = None
    if place.rank == 0:
        restart = begin(this, options.folder / WORKER_LOG, place.max_restarts)
    this.folder.mkdir(parents=True, exist_ok=True)
    if by_page:
        _print_into(this.folder / rank_file(WORKER_LOG, place.rank))
    status = _train(this, place, ending, restart)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if status in (RunStatus.FINISHED, RunStatus.STOPPED) else 1)


def _train(
    this: RestartAttempt, place: TorchrunEnv, ending: ShutdownListener, restart: Restart | None
) -> RunStatus:
    training = importlib.import_module("trainer.training.train")  # imports torch, some seconds

    def opened(recorder: Recorder) -> None:
        ending.opened(recorder)
        if place.rank == 0:
            recorder.describe(torchrun=_torchrun(place))
        if restart is not None:
            recorder.describe(**restart.run_json)
            recorder.event("restart", restart.text, **restart.run_json)

    # What was imported stays: each full collection would walk all of it, at the cost of steps.
    gc.freeze()
    status: RunStatus = training.run(this.config, this.folder, opened=opened)
    return status


def _torchrun(place: TorchrunEnv) -> dict[str, Any]:
    """Return what run.json keeps of the process that has started this one."""
    parent = importlib.import_module("psutil").Process(os.getppid())
    return process_identity() | {
        "pid": parent.pid,
        "pid_started": parent.create_time(),
        "pid_ticks": start_ticks(parent.pid),
        "restarts": place.restarts,
        "max_restarts": place.max_restarts,
    }


def _agreed_number(first: Path, place: TorchrunEnv) -> tuple[int | None, Any]:
    """Return the number of this attempt, which rank 0 finds and tells the others, and their store.

    None of a job that is complete: all ranks know it then, and may end.

    Each machine's torchrun counts only the failures that it has seen itself, and a job that Slurm
    starts again counts from 0: the folders tell which attempts there were. The store is a new one
    for each attempt (TORCH_DISABLE_SHARE_RDZV_TCP_STORE, `trainer/launch_commands.py`).
    """
    store_of = importlib.import_module("torch.distributed").rendezvous
    store, rank, size = next(store_of("env://"))
    if rank == 0:
        number = free_number(first, place.restarts)
        said = complete(first, number)
        store.set("stepscope/attempt", str(number) if said is None else COMPLETE)
        if said is not None:
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
    told = store.get("stepscope/attempt").decode()
    if told != COMPLETE:
        return int(told), store
    store.set(f"stepscope/complete{rank}", "")
    if rank == 0:  # its process has the store's server
        store.wait([f"stepscope/complete{other}" for other in range(size)])
    return None, store


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.runners.rank_worker")
    parser.add_argument("folder", type=Path, help="the run's folder, the same on all machines")
    parser.add_argument("--config", metavar="FILE_OR_JSON", help="settings of the run")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    return options


def _given(text: str) -> RunConfig:
    """Return the configuration of a file, or of JSON in the command itself."""
    values = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    return RunConfig.from_dict(values)


def _print_into(path: Path) -> None:
    """Let this process print into a file of its own, from now on; the first rank shares one."""
    output = open_for_append(path)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)


if __name__ == "__main__":
    main()
