"""A run in a child process: slower to start, free of the page's GIL and of its CUDA state."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from stepscope.common.files import open_for_append
from stepscope.recorder.recovery import note_end
from stepscope.run import RunError, RunStatus, read_run
from trainer.config import RunConfig
from trainer.runners.job_outcome import log_text
from trainer.runners.unstarted_run import WORKER_LOG, cut_off, not_started

log = logging.getLogger(__name__)


class ProcessRun:
    """A run in a child process, which `trainer.runners.worker` is."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self._stopping = False
        # Unbuffered: bytes that a child that is gone did not take must not be tried again at close.
        with open(open_for_append(folder / WORKER_LOG, truncate=True), "wb") as output:
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
        self._waiter = threading.Thread(target=self._wait, name="stepscope-child", daemon=True)
        self._waiter.start()

    def alive(self) -> bool:
        return self._waiter.is_alive()

    def goes_on(self) -> bool:
        return False

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._waiter.join(timeout_s)
        if self._process.poll() is None:
            log.warning("the training process did not stop within %.1f s: killed", timeout_s)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._waiter.join(1.0)
            return False
        return True

    def end_with_server(self) -> None:
        """Note the end of the process that `stop` has killed."""
        step = 0
        with contextlib.suppress(RunError):
            step = int(read_run(self.folder).run_json.get("step", 0))
        note_end(self.folder, RunStatus.STOPPED, cut_off(step))

    def _wait(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._stopping:
            not_started(self.folder)
        elif code != 0:
            tail = log_text(self.folder / WORKER_LOG).strip().splitlines()[-1:]
            reason = f"The training process could not start (exit code {code}): {' '.join(tail)}"
            not_started(self.folder, reason)
