"""Child processes, with a time limit and output or with a port; and limits of this process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import psutil

HOST = "127.0.0.1"
START_S = 60.0  # the page imports torch
POLL_S = 0.02


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes; those that have ended are skipped."""
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


def end_process(process: psutil.Process, timeout_s: float) -> None:
    """End a process by SIGTERM, after `timeout_s` by SIGKILL, for whose effect it waits as long."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal_all([process], number)
        if not psutil.wait_procs([process], timeout_s)[1]:
            return


def kill_group(leader: int) -> None:
    """Kill the processes of the group that a child leads, or has led: it keeps the child's pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_tree(child: int) -> None:
    """Kill a child that was not waited for, all its descendants, and the group that it leads."""
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(child)
        launcher.suspend()  # torchrun must not start ranks, which lead other sessions
        signal_all(launcher.children(recursive=True), signal.SIGKILL)
    kill_group(child)


def kill_until_none(find: Callable[[], Set[psutil.Process]], timeout_s: float) -> None:
    """Kill what `find` returns until it returns nothing: a process may start others meanwhile."""
    until = time.monotonic() + timeout_s
    left = find()
    while left and time.monotonic() < until:
        signal_all(left, signal.SIGKILL)
        # A process that is ending may have no environment, by which it could be found.
        left = {*psutil.wait_procs(left, timeout=POLL_S)[1]} | find()


class ChildState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ChildOutput:
    """Output of a child process: a lesson's text, or an estimate's progress (`share`, 0 to 1)."""

    state: ChildState
    seconds: float = 0.0
    text: str = ""
    share: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


class ChildProcess:
    """A process in a new session that ends when its stdin closes. Raises OSError."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        first_line: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._stopping = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=True,
            bufsize=0,  # close() must not retry bytes that an ended child did not read
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended: see its output
            self._process.stdin.write(first_line)
        self._waiter = threading.Thread(target=self._wait, name="stepscope-child", daemon=True)

    def _wait(self) -> None:
        """Wait for the process to end; runs in its own thread."""
        raise NotImplementedError


class Child(ChildProcess):
    """A process with a time limit that prints a JSON object per line, passed to `_take`.

    Thread-safe.
    """

    def __init__(
        self, command: Sequence[str], *, limit_s: float, stderr: int | IO[bytes], **options: Any
    ) -> None:
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._ended: ChildOutput | None = None
        self._late = False
        super().__init__(command, stdout=subprocess.PIPE, stderr=stderr, **options)
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="stepscope-child", daemon=True
        )
        self._reader.start()
        self._waiter.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def output(self) -> ChildOutput:
        return self._ended or self._now()

    def running(self) -> bool:
        """Return True until the process has ended and its output is complete."""
        return self._ended is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the process to end; return False after a timeout."""
        self._waiter.join(timeout_s)
        return not self.running()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Kill the process if it runs, and wait for its end."""
        self._stopping = True
        if self.running():
            self._end()
        self._waiter.join(timeout_s)

    def _now(self) -> ChildOutput:
        return ChildOutput(ChildState.RUNNING, self.seconds)

    def _take(self, content: dict[str, Any]) -> None:
        """Process an output line."""

    def _result(self, code: int) -> ChildOutput:
        raise NotImplementedError

    def _end(self) -> None:
        if self._process.poll() is None:
            kill_tree(self._process.pid)
        else:
            kill_group(self._process.pid)

    def _read(self, stream: IO[bytes]) -> None:
        with stream, open(stream.fileno(), "rb", closefd=False) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # printed by a library
                    content = json.loads(line)
                    if isinstance(content, dict):
                        self._take(content)

    def _wait(self) -> None:
        try:
            code = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self._late = True
            self._end()
            code = self._process.wait()
        kill_group(self._process.pid)  # orphans
        self._reader.join(2.0)  # a process of another group may hold the pipe
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._ended = self._result(code)


def free_port(ports: Iterable[int] = (0,)) -> int | None:
    """Return the first port that a server can bind on 127.0.0.1, or None; 0 is any port."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    return None


def wait_until_it_listens(pid: int, port: int) -> bool:
    """Return True once the process itself listens on the port; False if it ends before START_S.

    Another process may bind a free port first, so a connection would not show whose server it is.
    """
    until = time.monotonic() + START_S
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections  # before 6
        while time.monotonic() < until and process.is_running():
            if process.status() == psutil.STATUS_ZOMBIE:
                break
            for each in connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
            time.sleep(0.1)
    return False


PR_SET_PDEATHSIG = 1  # linux/prctl.h
NICENESS = 10  # of a process that parses an untrusted file


def set_parent_death_signal() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def call_at_end_of(pipe: int, action: Callable[[], object]) -> None:
    """Start a thread that calls `action` when the other end of a pipe is closed."""

    def wait() -> None:
        # Not sys.stdin: a thread that holds its lock while waiting aborts the interpreter at exit.
        while os.read(pipe, 1024):
            pass
        action()

    threading.Thread(target=wait, name="stepscope-parent", daemon=True).start()


def kill_own_group() -> None:
    """Kill this process and, if it leads a process group, the group."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def limit_process(*, memory: int, cpu_s: int, file_bytes: int) -> None:
    """Limit this process's address space, CPU time and size of files; no core dump."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard))
    os.nice(NICENESS)
