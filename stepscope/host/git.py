"""Run git: no prompt, no hook, no lock or file written in the repository, no endless wait."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stepscope.host.child_process import kill_group

LIMIT_S = 10.0  # Of a command; a network disk may be slow.
FETCH_LIMIT_S = 300.0  # While git may fetch missing objects or large files.
END_S = 0.5  # Maximum time from the end of the output of a git that has failed to its exit.
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


class GitError(Exception):
    """Git has failed; the message is the reason in one line."""


@contextlib.contextmanager
def git_output(cwd: Path, *arguments: str, fetches: bool = False) -> Iterator[IO[bytes]]:
    """Yield the output of a git command; kill git, and what git started, if the block raises.

    `fetches` permits a partial clone to fetch what it lacks. Raises GitError if git cannot be
    started, fails, or takes longer than LIMIT_S, with `fetches` FETCH_LIMIT_S.
    """
    limit_s = FETCH_LIMIT_S if fetches else LIMIT_S
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
            raise GitError(f"git cannot be started ({error.strerror}: {error.filename})") from None
        timer = threading.Timer(limit_s, kill_group, (process.pid,))
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            yield process.stdout
            process.stdout.read()  # the rest, without which git would end by SIGPIPE
            process.wait()
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if not process.returncode:
                raise
            # The block failed because the output ended too early: the reason is git's.
        finally:
            timer.cancel()
            if process.poll() is None:
                kill_group(process.pid)
            process.communicate()
        if process.returncode == -signal.SIGKILL:
            raise GitError(f"git does not end within {limit_s:g} s")
        if process.returncode:
            errors.seek(0)
            reason = errors.read(1000).decode(errors="replace").strip().partition("\n")[0]
            raise GitError(reason or f"git {arguments[0]}: exit code {process.returncode}")
