"""Where a run's loop lives: a thread of this process or a child process, one interface.

Both write the same run folder and take the same commands from it, so no reader can tell them
apart. torch is imported inside the thread or the child: the page starts without waiting for it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from stepscope.recording.recorder import Recorder
from stepscope.run import (
    RunError,
    RunStatus,
    new_run_folder,
    process_identity,
    read_run,
    write_run_json,
)
from trainer.config import RunConfig, Runner

log = logging.getLogger(__name__)

WORKER_LOG = "worker.log"
UNSTARTED = "Stopped before training began."
LIVE = tuple(status for status in RunStatus if status.live)


class ActiveRun(Protocol):
    """A run that this process started."""

    folder: Path

    def alive(self) -> bool:
        """Return True until the run has written its last row."""

    def stop(self, timeout_s: float) -> bool:
        """End the run at its next step boundary; return False if it took longer."""

    def end_with_server(self) -> None:
        """Note the end of a run that did not stop in time: this process is about to end."""


def start(config: RunConfig, root: Path) -> ActiveRun:
    """Create a run folder under `root` and start training into it.

    Raises OSError where the folder cannot be made or the child not started. What goes wrong later
    is the status of the run.
    """
    folder = new_run_folder(root, config.workload)
    _write_pending(folder, config)
    try:
        in_thread = config.runner is Runner.THREAD
        return ThreadRun(config, folder) if in_thread else ProcessRun(config, folder)
    except (OSError, RuntimeError) as error:  # too many processes or threads, no memory for one
        # The run would count as live for as long as this process: run.json names it.
        _mark(folder, RunStatus.FAILED, f"Training could not start: {error}.")
        raise OSError(str(error)) from error


class ThreadRun:
    """A run in a background thread of this process."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self._config = config
        self._stop = threading.Event()
        self._recorder: Recorder | None = None
        self._thread = threading.Thread(target=self._train, name="stepscope-training", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_with_server(self) -> None:
        if self._recorder is None:
            _mark(self.folder, RunStatus.STOPPED, UNSTARTED)
        else:
            self._recorder.close(RunStatus.STOPPED, _cut_off(self._recorder.step))

    def _train(self) -> None:
        try:
            session = importlib.import_module("trainer.training.run")
            if self._stop.is_set():
                _mark(self.folder, RunStatus.STOPPED, UNSTARTED)
            else:
                session.run(self._config, self.folder, stop=self._stop, opened=self._opened)
        except Exception as error:
            log.exception("training thread ended")
            reason = f"Training could not start: {error}"
            _mark(self.folder, RunStatus.FAILED, reason)

    def _opened(self, recorder: Recorder) -> None:
        self._recorder = recorder


class ProcessRun:
    """A run in a child process: slower to start, free of the page's GIL and of its CUDA state."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self._stopping = False
        # Unbuffered: what a child that is gone does not take must not be tried again at the close.
        with (folder / WORKER_LOG).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.runners.worker", str(folder.resolve())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).resolve().parents[2],
                start_new_session=True,
                bufsize=0,
            )
        # The pipe stays open: its end tells the child that this process is gone.
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
            self._process.stdin.write(json.dumps(config.to_dict()).encode() + b"\n")
        self._watch = threading.Thread(target=self._wait, name="stepscope-child", daemon=True)
        self._watch.start()

    def alive(self) -> bool:
        return self._watch.is_alive()

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._watch.join(timeout_s)
        if self._process.poll() is None:
            log.warning("the training process did not stop within %.1f s: killed", timeout_s)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._watch.join(1.0)
            return False
        return True

    def end_with_server(self) -> None:
        """Note it of the process that `stop` has killed."""
        step = 0
        with contextlib.suppress(RunError):
            step = int(read_run(self.folder).run_json.get("step", 0))
        _mark(self.folder, RunStatus.STOPPED, _cut_off(step), instead_of=LIVE)

    def _wait(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._stopping:
            _mark(self.folder, RunStatus.STOPPED, UNSTARTED)
        elif code != 0:
            tail = (self.folder / WORKER_LOG).read_text(errors="replace").strip().splitlines()[-1:]
            reason = f"The training process could not start (exit code {code}): {' '.join(tail)}"
            _mark(self.folder, RunStatus.FAILED, reason)


def _write_pending(folder: Path, config: RunConfig) -> None:
    """Write the run.json that stands until the loop's recorder writes its own."""
    now = time.time()
    where = "the training thread" if config.runner is Runner.THREAD else "a training process"
    write_run_json(
        folder,
        {
            "schema": 1,
            "name": config.workload,
            "created": now,
            "status": RunStatus.PENDING,
            "reason": f"Starting {where}: the first time PyTorch takes some seconds to load.",
            "heartbeat": now,
            "problem": None,
            "config": config.to_dict(),
            **process_identity(),
        },
    )


def _cut_off(step: int) -> str:
    return (
        f"The server was shut down while the run was busy after step {step}. What it had recorded "
        "is kept; a checkpoint that was being written is not."
    )


def _mark(
    folder: Path,
    status: RunStatus,
    reason: str,
    instead_of: Collection[RunStatus] = (RunStatus.PENDING,),
) -> None:
    """Note how a run ended that has no recorder to say it: it never came, or was killed."""
    try:
        run_json = read_run(folder).run_json
        if run_json["status"] in instead_of:
            ended = {"status": status, "reason": reason, "ended": time.time()}
            write_run_json(folder, {**run_json, **ended})
    except (RunError, OSError) as error:
        log.warning("the end of the run could not be noted: %s", error)
