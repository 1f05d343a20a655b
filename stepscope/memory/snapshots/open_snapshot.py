"""Open an untrusted snapshot file in a child process with limits; this module is that process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from stepscope.common.files import PlainUnpickler, open_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.host.child_process import limit_process, set_parent_death_signal
from stepscope.memory.snapshots.summary import SnapshotSummary, summarize

MAX_FILE_BYTES = 250 * 2**20  # Its Python objects need up to nine times as much memory.
CHUNK = 2**20  # Bytes read at once.
SMALLER = (
    "Record fewer steps or a lower max_entries, or open it with https://pytorch.org/memory_viz."
)
REMEDY = "Record it with torch.cuda.memory._dump_snapshot, or with Memory snapshot on the page."


class SnapshotError(ValueError):
    """Raised for a file that is no valid snapshot; the message is a sentence with a remedy."""


def load(path: Path) -> SnapshotSummary:
    """Return the summary of a snapshot. Raises SnapshotError.

    A file may need any amount of memory: `open_snapshot` limits it in a child process.
    """
    name = printable(path.name)[:100]
    try:
        descriptor = open_regular_file(path, follow_links=True)
    except OSError as error:
        raise SnapshotError(
            f"{name}: must be a file that can be read ({error.strerror}). {REMEDY}"
        ) from error
    with open(descriptor, "rb", CHUNK) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise SnapshotError(
                f"{name}: must have at most {MAX_FILE_BYTES:,} bytes, got {size:,}. {SMALLER}"
            )
        try:
            root = PlainUnpickler(file).load()
        except MemoryError as error:
            raise SnapshotError(
                f"{name}: a file of {format_bytes(size)} needs more memory than its process may "
                f"use. {SMALLER}"
            ) from error
        except Exception as error:
            # Python's unpickler raises anything for a broken file, as documented.
            reason = printable(str(error))[:200] or type(error).__name__
            raise SnapshotError(
                f"{name}: must be a pickle of plain containers, got one that cannot be read "
                f"({reason}). {REMEDY}"
            ) from error
        if not isinstance(root, dict) or not isinstance(root.get("segments"), list):
            raise SnapshotError(
                f"{name}: must hold a dict with a list of segments, got {type(root).__name__}. "
                f"{REMEDY}"
            )
        return summarize(root)


MAX_MEMORY = 4 * 10**9  # Bytes of address space: a file of 250 MB needs 2.2 GB of memory.
MAX_CPU_S = 120
MAX_RESULT_BYTES = 64 * 2**20
MAX_WALL_S = 600.0  # The process may have to wait for others on a busy machine.
POLL_S = 0.1
MODULE = "stepscope.memory.snapshots.open_snapshot"
PACKAGES = Path(__file__).parents[3]  # Folder of this package, which may not be installed.
MAX_ERROR_CHARS = 600


class SnapshotOpening:
    """Opens one snapshot in a child process; call `poll` until it returns True, or `close`.

    Not thread-safe. Raises OSError if no process can be started.
    """

    def __init__(self, path: Path) -> None:
        self.summary: SnapshotSummary | None = None
        self.error: str | None = None  # Why the file could not be opened, as a sentence.
        self._name = printable(path.name)
        self._deadline = time.monotonic() + MAX_WALL_S
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        paths = filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH")))
        self._process = subprocess.Popen(
            # -P: a file of the working directory must not take the place of a module.
            [sys.executable, "-P", "-m", MODULE, str(path.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=self._result,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in the terminal is meant for this process
        )

    def poll(self) -> bool:
        """Return True once `summary` or `error` is set."""
        if self.summary is not None or self.error is not None:
            return True
        code = self._process.poll()
        if code == 0:
            self._result.seek(0)
            self.summary = msgspec.json.decode(self._result.read(), type=SnapshotSummary)
        elif code is not None:
            assert self._process.stderr is not None
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            self.error = printable(self._reason(code, lines[-1:]))[:MAX_ERROR_CHARS]
        elif time.monotonic() > self._deadline:
            self.error = f"{self._name}: took more than {MAX_WALL_S:.0f} s. {REMEDY}"
        else:
            return False
        self.close()
        return True

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        with self._process:  # waits for its end and closes its pipes
            self._result.close()

    def _reason(self, code: int, lines: list[str]) -> str:
        if code == -signal.SIGXCPU:
            return f"{self._name}: took more than {MAX_CPU_S} s to open. {REMEDY}"
        if code < 0:
            how = signal.strsignal(-code) or f"signal {-code}"
            return (
                f"{self._name}: broke the process that opened it ({how}), as no snapshot does. "
                f"{REMEDY}"
            )
        if lines:
            return lines[0]
        return f"{self._name}: could not be opened (exit code {code}). {REMEDY}"


def open_snapshot(path: Path) -> SnapshotSummary:
    """Return the summary of a snapshot; blocks. Raises SnapshotError and OSError."""
    opening = SnapshotOpening(path)
    try:
        while not opening.poll():
            time.sleep(POLL_S)
    finally:
        opening.close()
    if opening.summary is None:
        raise SnapshotError(opening.error)
    return opening.summary


def main(path: Path) -> int:
    """Write the summary of a snapshot to stdout as JSON; return the exit code."""
    gc.disable()  # with millions of new objects it takes most of the time
    limit_process(memory=MAX_MEMORY, cpu_s=MAX_CPU_S, file_bytes=MAX_RESULT_BYTES)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(load(path)))
        sys.stdout.flush()
    except MemoryError:
        error = f"needs more than {format_bytes(MAX_MEMORY)} of memory to open. Record fewer steps."
        return _fail(f"{path.name}: {error}")
    except SnapshotError as error:
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the page shows this one line
        reason = f"{type(error).__name__}: {error}"[:200]
        return _fail(f"{path.name}: cannot be summarized ({reason}). {REMEDY}")
    return 0


def _fail(text: str) -> int:
    sys.stderr.write(printable(text) + "\n")
    return 1


if __name__ == "__main__":
    set_parent_death_signal()
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # to free ten million objects one by one would take seconds
