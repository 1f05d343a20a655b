"""Connections to the runs of other hosts: `stepscope ui ssh://host/path`, by the user's own ssh."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import select
import shlex
import struct
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import msgspec

from stepscope.common.files import modified_ns
from stepscope.remote import far_reader
from stepscope.remote.mirror import Answer, Mirror
from stepscope.run import is_run_id
from stepscope.store import STORE_NAME, StoreError

log = logging.getLogger(__name__)

SOURCES = "STEPSCOPE_SOURCES"
"""Environment variable with the sources of `stepscope ui`, a JSON list of texts."""
SSH = "STEPSCOPE_SSH"
"""Environment variable with another command than ssh, such as "ssh -F other_config"."""
OPTIONS = (
    # Neither the agent nor forwarded ports for an untrusted host. A master connection is used, but
    # not created: it would end with this process, and with it the user's other sessions.
    *("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlMaster=no"),
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
SILENCE_S, ANSWER_S = 20.0, 180.0  # without a byte, and in all
MAX_NOISE_BYTES = 64 * 1024  # what a login script may print before the first answer
MAX_FRAME_BYTES, MAX_ANSWER_BYTES = 32 * 2**20, 64 * 2**20  # deflated, inflated
LIVE_POLL_S, IDLE_POLL_S = 0.5, 5.0
COMMAND_POLL_S = 0.1  # interval of looking for commands in the mirror
WANTED_S = 60.0  # a run is updated for this long after its page has asked for it
MAX_FOLLOWED = 20  # live runs that are updated without a page
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
MAX_BYTES_PER_S = 4e6  # inflated
MAX_MIRROR_BYTES = 5 * 10**9

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class SshAddress:
    """Address of a folder of runs on another host; a `path` may begin with "~/"."""

    host: str
    path: str
    user: str | None = None
    port: int | None = None

    @property
    def label(self) -> str:
        """The host and the folder, as scp writes them."""
        return f"{self.host}:{self.path}"


def parse_address(text: str) -> SshAddress:
    """Return the address of ssh://[user@]host[:port]/path. Raises ValueError.

    >>> parse_address("ssh://me@login1:2222/~/runs")
    SshAddress(host='login1', path='~/runs', user='me', port=2222)
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"source: {error}, got {text[:200]!r}. Use ssh://host/path.") from None
    user, _, host = parts.netloc.rpartition("@")
    host = re.sub(r":\d*$", "", host)
    path = unquote(parts.path)
    path = path[1:] if path.startswith("/~/") else path
    is_plain = parts.scheme == "ssh" and not parts.query and not parts.fragment
    for valid, what in (
        (is_plain, "must be ssh://host/path"),
        (_HOST.fullmatch(host), "the host must be a name or an address"),
        (not user or _USER.fullmatch(user), "the user must be a login name without a password"),
        (port != 0, "the port must be 1 to 65535"),
        (len(path) > 1 and path.isprintable(), "the path must be that of a folder"),
    ):
        if not valid:
            shown = re.sub(r":[^:@/]*@", ":…@", text[:200])  # without a password
            raise ValueError(f"source: {what}, got {shown!r}. Use ssh://login1/scratch/runs.")
    return SshAddress(host, path, user or None, port)


def sources_from_environment() -> dict[str, SshAddress | Path]:
    """Return the sources of STEPSCOPE_SOURCES by their texts. Raises ValueError."""
    try:
        texts = msgspec.json.decode(os.environ.get(SOURCES) or "[]", type=list[str])
    except ValueError as error:
        raise ValueError(f"{SOURCES}: must be a JSON list of texts ({error}).") from None
    return {text: parse_source(text) for text in texts}


def parse_source(text: str) -> SshAddress | Path:
    """Return an ssh address, or the absolute path of a local folder. Raises ValueError."""
    if "://" in text:
        return parse_address(text)
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"source: must be an existing folder or ssh://host/path, got {text!r}.")
    return path


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """`text` is why there is no connection; `delay_s` the last round trip, None if none was."""

    connected: bool = False
    text: str | None = None
    delay_s: float | None = None
    retry_in_s: float | None = None


CLOSED = "The connection was closed."


class ConnectionLostError(Exception):
    """The connection has ended; the message is the reason."""


def mirror_folder(address: SshAddress) -> Path:
    """Return the folder in which the runs of an address are mirrored."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(repr(address).encode()).hexdigest()[:10]
    return cache / "stepscope" / "remote" / f"{address.host.strip('[]')}-{digest}"


class RemoteSource:
    """Mirrors the runs of one address into `folder`, by one thread. `close` ends it."""

    def __init__(self, address: SshAddress, mirror: Path | None = None) -> None:
        self.address = address
        self.label = address.label
        self.folder = mirror or mirror_folder(address)
        self._state = ConnectionState()
        self._retry_at: float | None = None
        self._wanted: dict[str, float] = {}
        self._wake = threading.Event()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        name = f"stepscope-remote-{address.host}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if (process := self._process) is not None:
            process.kill()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def state(self) -> ConnectionState:
        """Return the present state. Thread-safe."""
        state, retry_at = self._state, self._retry_at
        if state.connected or retry_at is None:
            return state
        return replace(state, retry_in_s=max(0.0, retry_at - time.monotonic()))

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
            began, reason = time.monotonic(), "The connection was ended."
            try:
                mirror = mirror or Mirror(self.folder, self.label)
                with tempfile.TemporaryFile() as errors:
                    try:
                        self._serve(mirror, self._connect(errors))
                    except (ConnectionLostError, BrokenPipeError) as error:
                        reason = self._reason(errors, error)
                    finally:
                        self._end_process()
            except OSError as error:
                reason = f"The mirror {self.folder} cannot be written: {error}."
            except Exception as error:  # what a host sends must not end the thread
                log.exception("%s: the connection failed", self.label)
                reason = f"{type(error).__name__}: {error}"
            if time.monotonic() - began > LAST_RETRY_S:
                retry_s = FIRST_RETRY_S
            self._retry_at = time.monotonic() + retry_s
            self._state = ConnectionState(text=reason, delay_s=self._state.delay_s)
            self._pause(retry_s)
            self._retry_at = None
            retry_s = min(LAST_RETRY_S, 2 * retry_s)
        if mirror is not None:
            mirror.close()

    def _connect(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start ssh with the program of the far side as the first bytes of its stdin."""
        source = Path(far_reader.__file__).read_bytes()
        start = f"import sys;exec(sys.stdin.buffer.read({len(source)}))"
        address = self.address
        target = address.host.strip("[]")
        command = [*shlex.split(os.environ.get(SSH) or "ssh"), *OPTIONS]
        command += ["-p", str(address.port)] if address.port else []
        command += ["-l", address.user] if address.user else []
        self._process = process = subprocess.Popen(
            [*command, "--", target, f"python3 -uc '{start}'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C of the server must not end it before its runs do
        )
        if self._closing:
            process.kill()
        assert process.stdin is not None
        process.stdin.write(source + json.dumps({"root": address.path}).encode() + b"\n")
        process.stdin.flush()
        return process

    def _end_process(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._process = None

    def _reason(self, errors: IO[bytes], error: Exception) -> str:
        """Return why the connection ended: the last lines of ssh if it was closed."""
        if isinstance(error, ConnectionLostError) and str(error) != CLOSED:
            return str(error)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
        text = " ".join(line for line in lines if line)[-300:]
        if "python3" in text and "not found" in text:
            return f"{text}. The host needs python3 (3.6 or newer) on the PATH."
        return text or str(error)

    def _serve(self, mirror: Mirror, process: subprocess.Popen[bytes]) -> None:
        """Ask and mirror until the connection ends. Raises ConnectionLostError."""
        assert process.stdin is not None
        assert process.stdout is not None
        frames = _Frames(process.stdout)
        frames.skip_noise()
        known: dict[str, Any] | None = mirror.known()
        far_now: float | None = None
        while not self._closing:
            followed = self._followed(mirror)
            if mirror.bytes > MAX_MIRROR_BYTES:
                mirror.shrink(int(0.8 * MAX_MIRROR_BYTES), followed)
            if mirror.bytes > MAX_MIRROR_BYTES:
                raise ConnectionLostError(f"The mirror has {mirror.bytes:,} bytes of live runs.")
            commands = [] if far_now is None else list(_commands(mirror, followed, far_now))
            cursors = {run: mirror.cursor(run, large=run in self._wanted) for run in followed}
            request: dict[str, Any] = {"known": known, "live": list(mirror.live)}
            request |= {"commands": commands, "follow": cursors}
            asked = time.monotonic()
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer, size = frames.next()
            answered = time.monotonic()
            if answer.error is not None:
                raise ConnectionLostError(f"{self.address.host}: {answer.error[:300]}.")
            mirror.apply(answer, followed)
            known = None
            for run, number, *_ in commands:
                refused = {(one[0], one[1]): one[2] for one in answer.commands}
                mirror.end_command(run, number, refused.get((run, number), "It was not stored."))
            self._state = ConnectionState(connected=True, delay_s=answered - asked)
            self._pause(size / MAX_BYTES_PER_S)
            if not answer.more:
                folders = [mirror.root / run for run in followed]
                self._pause(LIVE_POLL_S if followed else IDLE_POLL_S, folders)
            far_now = answer.now + time.monotonic() - answered

    def _followed(self, mirror: Mirror) -> list[str]:
        """Return the runs to update: those that a page shows, and the newest live ones."""
        since = time.monotonic() - WANTED_S
        self._wanted = {run: at for run, at in self._wanted.copy().items() if at > since}
        wanted = sorted(self._wanted, key=self._wanted.__getitem__, reverse=True)
        return [*dict.fromkeys([*wanted, *sorted(mirror.live, reverse=True)[:MAX_FOLLOWED]])]

    def _pause(self, seconds: float, folders: Sequence[Path] = ()) -> None:
        """Sleep until `close`, a wanted run, or a command: it touches one of the folders."""
        before = [modified_ns(folder) for folder in folders]
        until = time.monotonic() + seconds
        while not self._closing and (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, COMMAND_POLL_S)):
                self._wake.clear()
                return
            if [modified_ns(folder) for folder in folders] != before:
                return


def _commands(mirror: Mirror, followed: Iterable[str], far_now: float) -> Iterable[list[Any]]:
    """Yield the commands to deliver, each with its run and its deadline by the far clock."""
    for run in followed:
        if run in mirror.live and (mirror.root / run / STORE_NAME).exists():
            try:
                for number, name, args, left_s in mirror.commands(run):
                    yield [run, number, name, args, far_now + left_s]
            except StoreError as error:
                log.warning("%s: its commands cannot be read: %s", run, error)


class _Frames:
    """Frames of an untrusted pipe, each within a time and a size."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._buffer = bytearray()
        self._until = 0.0

    def skip_noise(self) -> None:
        """Read up to the first line of the far program."""
        self._until = time.monotonic() + ANSWER_S
        while (place := self._buffer.find(far_reader.MAGIC)) < 0:
            if len(self._buffer) > MAX_NOISE_BYTES:
                raise ConnectionLostError("The login script of the host prints too much.")
            self._read()
        del self._buffer[: place + len(far_reader.MAGIC)]

    def next(self) -> tuple[Answer, int]:
        """Return the next answer and its inflated size. Raises ConnectionLostError."""
        self._until = time.monotonic() + ANSWER_S
        (size,) = struct.unpack(">I", self._take(4))
        if size > MAX_FRAME_BYTES:
            raise ConnectionLostError(f"The host sent an answer of {size:,} bytes.")
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(self._take(size), MAX_ANSWER_BYTES)
            if not inflate.eof:
                raise ConnectionLostError("The host sent an answer that is too large.")
            return msgspec.json.decode(data, type=Answer), len(data)
        except (zlib.error, ValueError, RecursionError) as error:
            raise ConnectionLostError(f"The host sent an invalid answer ({error}).") from None

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._read()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _read(self) -> None:
        left_s = min(SILENCE_S, self._until - time.monotonic())
        if left_s <= 0 or not self._poll.poll(1000 * left_s):
            raise ConnectionLostError("The host does not answer.")
        data = os.read(self._descriptor, 1 << 20)
        if not data:
            raise ConnectionLostError(CLOSED)
        self._buffer += data
