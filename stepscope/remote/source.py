"""Connections to the runs of other hosts: `stepscope ui ssh://host/path`, by the user's own ssh."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from stepscope.remote import far_reader
from stepscope.remote.mirror import Answer, Mirror
from stepscope.run import is_run_id

log = logging.getLogger(__name__)

SOURCES = "STEPSCOPE_SOURCES"
"""Environment variable with the sources of `stepscope ui`, a JSON list of texts."""
SSH = "STEPSCOPE_SSH"
"""Environment variable with another command than ssh, such as "ssh -F other_config"."""
OPTIONS = (
    # Neither the agent nor forwarded ports for an untrusted host. A master connection is used, but
    # not created: it would end with this process, and with it the user's other sessions.
    *("-T", "-a", "-x", "-C", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
ANSWER_S = 60.0
MAX_NOISE_LINES = 1000  # that a login script may print before the first answer
MAX_ANSWER_BYTES = 64 * 2**20
LIVE_POLL_S, IDLE_POLL_S = 0.5, 5.0
WANTED_S = 60.0  # a run is updated for this long after its page has asked for it, or its end
MAX_FOLLOWED = 20  # live runs that are updated without a page
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
MAX_BYTES_PER_S = 4e6

_ADDRESS = re.compile(
    r"(ssh://(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[\w:.%]+\])(?::\d+)?)/(~/.*|.+)", re.ASCII
)
"""The destination as ssh reads it, and the path, which is absolute or begins with "~/"."""


def parse_source(text: str) -> str | Path:
    """Return a valid ssh address, or the absolute path of a local folder. Raises ValueError."""
    if "://" in text:
        if not _ADDRESS.fullmatch(text) or not text.isprintable():
            shown = text.rpartition("@")[2]  # without a password
            raise ValueError(
                "source: must be ssh://[user@]host[:port]/path without a password, got "
                f"{shown[:200]!r}. Use ssh://login1/scratch/runs."
            )
        return text
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"source: must be an existing folder or ssh://host/path, got {text!r}.")
    return path


def sources_from_environment() -> list[str | Path]:
    """Return the sources of STEPSCOPE_SOURCES, each once. Raises ValueError."""
    try:
        texts = msgspec.json.decode(os.environ.get(SOURCES) or "[]", type=list[str])
    except ValueError as error:
        raise ValueError(f"{SOURCES}: must be a JSON list of texts ({error}).") from None
    return list(dict.fromkeys(map(parse_source, texts)))


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """`text` is why there is no connection; `delay_s` the last round trip, None if none was.

    `retry_at` is the monotonic time of the next attempt.
    """

    connected: bool = False
    text: str | None = None
    delay_s: float | None = None
    retry_at: float | None = None


class RemoteSource:
    """Mirrors the runs of one address into `folder`, by one thread. `close` ends it."""

    def __init__(self, address: str) -> None:
        self.label = address.removeprefix("ssh://")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = cache / "stepscope" / "remote" / quote(self.label, safe="")
        self._address = address
        self._state = ConnectionState()
        self._wanted: dict[str, float] = {}
        self._wake = threading.Event()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="stepscope-remote", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._process is not None:
            self._process.kill()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def state(self) -> ConnectionState:
        """Return the present state. Thread-safe."""
        return self._state

    def want(self, run_id: str) -> None:
        """Mirror a run now, and for the next minute, with its snapshots and traces. Thread-safe."""
        is_new = time.monotonic() - self._wanted.get(run_id, -WANTED_S) >= WANTED_S
        if is_run_id(run_id):
            self._wanted[run_id] = time.monotonic()
            if is_new:
                self._wake.set()

    def _run(self) -> None:
        retry_s, mirror = FIRST_RETRY_S, None
        while not self._closing:
            try:
                mirror = mirror or Mirror(self.folder, self.label)
                reason = self._connect(mirror)
            except OSError as error:  # of the mirror, or without ssh
                reason = str(error)
            except Exception as error:  # what a host sends must not end the thread
                log.exception("%s: the connection failed", self.label)
                reason = f"{type(error).__name__}: {error}"
            retry_s = FIRST_RETRY_S if self._state.connected else min(LAST_RETRY_S, 2 * retry_s)
            retry_at = time.monotonic() + retry_s
            delay_s = self._state.delay_s
            self._state = ConnectionState(text=reason, delay_s=delay_s, retry_at=retry_at)
            self._pause(retry_s)
        if mirror is not None:
            mirror.close()

    def _connect(self, mirror: Mirror) -> str:
        """Mirror over one connection until it ends; return why it ended. Raises OSError.

        The program of the far side is the first bytes of the stdin of ssh.
        """
        found = _ADDRESS.fullmatch(self._address)
        assert found is not None
        path = unquote(found[2] if found[2].startswith("~/") else f"/{found[2]}")
        source = Path(far_reader.__file__).read_bytes()
        start = f"python3 -uc 'import sys;exec(sys.stdin.buffer.read({len(source)}))'"
        command = [*shlex.split(os.environ.get(SSH) or "ssh"), *OPTIONS, "--", found[1], start]
        with tempfile.TemporaryFile() as errors:
            try:
                with subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C of the server must not end it before its runs
                ) as self._process:
                    try:
                        first = source + json.dumps(path).encode() + b"\n"
                        if not self._closing:
                            self._serve(mirror, self._process, first)
                    finally:
                        self._process.kill()
            except BrokenPipeError:
                pass  # ssh has ended
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 300))
            text = " ".join(errors.read().decode(errors="replace").split())
            return text or "The connection was closed, or the host did not answer."

    def _serve(self, mirror: Mirror, process: subprocess.Popen[bytes], first: bytes) -> None:
        """Request and mirror what is new until `close`. Raises OSError."""
        line = _exchange(process, first)
        for _ in range(MAX_NOISE_LINES):
            if line.endswith(far_reader.MAGIC):
                break
            line = _exchange(process, b"")
        started: set[str] = set()  # runs that the far side has sent until now
        far_now = 0.0
        while not self._closing:
            followed = self._followed(mirror)
            mirror.shrink(followed)
            commands = mirror.commands(followed) if far_now else []
            request = {
                "now": far_now,
                "follow": {run: run in self._wanted for run in followed},
                "start": {run: mirror.start_of(run) for run in followed if run not in started},
                "commands": commands,
            }
            asked = time.monotonic()
            line = _exchange(process, json.dumps(request).encode() + b"\n")
            delay_s = time.monotonic() - asked
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except (ValueError, RecursionError) as error:
                raise OSError(f"The host sent an invalid answer ({error}).") from None
            if answer.error is not None:
                raise OSError(f"{self.label}: {answer.error[:300]}.")
            mirror.apply(answer)
            results = {(run, number): refused for run, number, refused in answer.commands}
            for run, number, *_ in commands:
                refused = results.get((run, number), "It was not stored.")
                mirror.end_command(run, number, refused)
            self._state = ConnectionState(connected=True, delay_s=delay_s)
            started = {run for run in followed if (mirror.root / run).exists()}
            far_now = answer.now
            if answer.more:
                self._pause(len(line) / MAX_BYTES_PER_S)
            else:
                self._pause(LIVE_POLL_S if followed else IDLE_POLL_S)

    def _followed(self, mirror: Mirror) -> list[str]:
        """Return the runs to update: those that a page shows, and the newest live ones."""
        since = time.monotonic() - WANTED_S
        self._wanted = {run: at for run, at in self._wanted.copy().items() if at > since}
        wanted = sorted(self._wanted, key=self._wanted.__getitem__, reverse=True)
        live = sorted((run for run, at in mirror.live.items() if at > since), reverse=True)
        return list(dict.fromkeys([*wanted, *live[:MAX_FOLLOWED]]))

    def _pause(self, seconds: float) -> None:
        """Sleep until `close` or until a page asks for another run."""
        self._wake.wait(seconds)
        self._wake.clear()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a request and return the next line of the host, which is untrusted. Raises OSError."""
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(ANSWER_S, process.kill)
    watchdog.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline(MAX_ANSWER_BYTES)
    finally:
        watchdog.cancel()
    if len(line) == MAX_ANSWER_BYTES:
        raise OSError("The host sent an answer that is too large.")
    if not line.endswith(b"\n"):
        raise BrokenPipeError
    return line
