"""Opening a snapshot file of anybody's: in a process with limits, and only once.

The summary is kept beside the file, or where that folder cannot be written, in a spare one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.common.files import is_own_folder
from stepscope.common.formatting import printable
from stepscope.memory.snapshots.load import REMEDY, SnapshotError
from stepscope.memory.snapshots.summary import Summary
from stepscope.memory.snapshots.summary_file import read_summary, summary_path
from stepscope.memory.snapshots.write import CPU_LIMIT_S

TIME_LIMIT_S = 600.0
"""Wall time: the process may have to wait for others on a busy machine."""
POLL_S = 0.1
_ROOT = Path(__file__).parents[2]
_SENTENCE_LIMIT = 600


class Opening:
    """One snapshot on its way; `poll` until `done`, from any thread, one at a time.

    `summary` is what `kept_summary` gave. Raises OSError where the file cannot be looked at or no
    process be started.
    """

    def __init__(self, path: Path, spare: Path, summary: Summary | None = None) -> None:
        found = path.stat()
        self.path = path
        self.share = 0.0
        """Of the file that has been read."""
        self.summary = summary
        self.error: str | None = None
        """A sentence where the file could not be opened."""
        self._state = (found.st_size, found.st_mtime_ns)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + TIME_LIMIT_S
        self._result = _place(path, spare)
        if self.summary is None:
            self._process = _start(path, self._result)

    @property
    def done(self) -> bool:
        """Say whether `summary` or `error` is there."""
        return self.summary is not None or self.error is not None

    def poll(self) -> bool:
        """Look how far it is; return `done`."""
        process = self._process
        if self.done or process is None:
            return self.done
        code = process.poll()
        assert process.stdout is not None
        said = process.stdout.read() or b""
        last = said.split()[-1:]
        if last and last[0].isdigit():
            self.share = min(1.0, int(last[0]) / max(1, self._state[0]))
        if code is None and time.monotonic() > self._deadline:
            self.close()
            self.error = f"{self.path.name}: took more than {TIME_LIMIT_S:.0f} s. {REMEDY}"
        elif code is not None:
            self._end(process, code)
        return self.done

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            _close(self._process)

    def _end(self, process: subprocess.Popen[bytes], code: int) -> None:
        assert process.stderr is not None
        words = process.stderr.read().decode(errors="replace").strip().splitlines()
        _close(process)
        if code == 0:
            self.summary = read_summary(self._result, *self._state)
            if self.summary is None:
                self.error = f"{self.path.name}: was changed while it was read. Open it again."
        else:
            self.error = printable(_why(self.path.name, code, words[-1:]))[:_SENTENCE_LIMIT]


def kept_summary(path: Path, spare: Path) -> Summary | None:
    """Return the summary that is kept of a file as it is now, if any. Raises OSError."""
    found = path.stat()
    return read_summary(_place(path, spare), found.st_size, found.st_mtime_ns)


def open_snapshot(
    path: Path, spare: Path, progress: Callable[[float], None] = lambda share: None
) -> Summary:
    """Return the summary of a snapshot, waiting for it. Raises SnapshotError and OSError.

    `spare` is a folder for it where that of the file cannot be written.
    """
    opening = Opening(path, spare, kept_summary(path, spare))
    try:
        while not opening.poll():
            progress(opening.share)
            time.sleep(POLL_S)
    finally:
        opening.close()
    if opening.summary is None:
        raise SnapshotError(opening.error)
    return opening.summary


def _place(path: Path, spare: Path) -> Path:
    """Return where the summary is kept."""
    beside = summary_path(path)
    if is_own_folder(path.parent) and os.access(path.parent, os.W_OK):
        return beside
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return spare / f"{name}.summary.json.gz"


def _start(path: Path, result: Path) -> subprocess.Popen[bytes]:
    roots = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        # -P: a file of the working directory must not take the place of a module.
        [sys.executable, "-P", "-m", "stepscope.memory.snapshots.write"]
        + [str(path.absolute()), str(result.absolute())],
        stdin=subprocess.PIPE,  # its end tells the child that this process is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # One thread is enough, and others would count against the limit of memory.
        env={**os.environ, "PYTHONPATH": roots, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _why(name: str, code: int, words: list[str]) -> str:
    if code == -signal.SIGXCPU:
        return f"{name}: took more than {CPU_LIMIT_S} s to open. {REMEDY}"
    if code < 0:
        how = signal.strsignal(-code) or f"signal {-code}"
        return f"{name}: broke the process that opened it ({how}), as no snapshot does. {REMEDY}"
    return words[0] if words else f"{name}: could not be opened (exit code {code}). {REMEDY}"


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
