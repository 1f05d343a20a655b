"""Run git: no prompt, no hook, no lock or file written in the repository, no endless wait."""

from __future__ import annotations

import contextlib
import io
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from stepscope.host.child_process import kill_group

SILENCE_S = 5.0  # Maximum time without a byte, such as on a slow network disk.
FETCH_SILENCE_S = 300.0  # While git fetches missing objects or large files.
END_S = 0.5  # Maximum time from the end of the output of a git that has failed to its exit.
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


class GitError(Exception):
    """Git has failed; the message is the reason in one line."""


class _Output(io.RawIOBase):
    """Standard output of git. Raises GitError after `silence_s` without a byte, or if `is_over`."""

    def __init__(self, pipe: int, silence_s: float, is_over: Callable[[], bool]) -> None:
        self._pipe, self._silence_s, self._is_over = pipe, silence_s, is_over
        self._ready = select.poll()
        self._ready.register(pipe, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        deadline = time.monotonic() + self._silence_s
        while not self._ready.poll(100):  # ms
            if self._is_over() or time.monotonic() > deadline:
                raise GitError(f"no answer within {self._silence_s:g} s")
        return os.readv(self._pipe, [buffer])


@contextlib.contextmanager
def git_output(
    cwd: Path,
    *arguments: str,
    fetches: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[BinaryIO]:
    """Yield the output of a git command; kill git, and what git started, if the block raises.

    `fetches` permits a partial clone to fetch what it lacks. Raises GitError if git cannot be
    started, fails, or writes nothing for SILENCE_S, or if `is_over` while git works.
    """
    silence_s = FETCH_SILENCE_S if fetches else SILENCE_S
    environment = os.environ | _ENVIRONMENT
    if not fetches:
        environment["GIT_NO_LAZY_FETCH"] = "1"
    with open(os.memfd_create("git"), "w+b") as errors:  # a disk may be full
        try:
            process = subprocess.Popen(
                [*_GIT, *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C belongs to the caller; no terminal to prompt in
            )
        except OSError as error:
            text = f"git cannot be started ({error.strerror}: {error.filename})"
            raise GitError(
                text if str(error.filename) == str(cwd) else f"{text}: install git"
            ) from None
        with process:
            assert process.stdout is not None
            pipe = process.stdout.fileno()
            try:
                with io.BufferedReader(_Output(pipe, silence_s, is_over)) as output:
                    yield output
                    output.read()  # the rest, without which git would end by SIGPIPE
                process.wait(silence_s)
            except BaseException as error:
                if not isinstance(error, GitError | subprocess.TimeoutExpired):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
                code = process.poll()
                kill_group(process.pid)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise GitError(f"git does not end within {silence_s:g} s") from None
                if isinstance(error, GitError) or code is None or code <= 0:
                    raise
                # The block failed because the output ended too early: the reason is git's.
        if process.returncode:
            errors.seek(0)
            reason = errors.read(1000).decode(errors="replace").strip().partition("\n")[0]
            raise GitError(reason or f"git {arguments[0]}: exit code {process.returncode}")
