"""One server for many tests: it starts each of them without runs."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from stepscope.run import RunError, RunKind, read_run, run_folders
from stepscope.store import StoreError
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from tests.support.server import Server, start_server, stop_server
from tests.support.waiting import wait_until


class SharedServer:
    """One server for all browser tests of a process, without runs at the start of each test.

    It stays while tests leave it as they found it. What it keeps of earlier tests, the sessions of
    closed tabs, the last results of lessons and the diagnoses of ended runs by folder, no later
    test may depend on: a run folder's name is used by one test only.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._server: Server | None = None
        self._names: set[str] = set()

    def get(self) -> Server:
        """Return the server; start it if there is none. No GPU even on the simulator."""
        if self._server is None:
            self._server = start_server(
                self._folders.mktemp("server"), CUDA_VISIBLE_DEVICES="", CUDASIM_NO_DRIVER="1"
            )
            self._names = set()
        return self._server

    def end_of_test(self) -> None:
        """Stop and remove the test's runs; stop a server that is not as it was before them."""
        server = self.get()
        names = {folder.name for folder in run_folders(server.runs)}
        if known := self._names & names:
            self.stop()
            pytest.fail(f"the server knows runs of these names, choose others: {known}")
        self._names |= names
        if server.process.poll() is not None:
            self._server = None
            return
        try:
            _stop_runs(server)
            wait_until(lambda: not _children(server), 20)
            wait_until(lambda: _emptied(server.runs), 20)
        except (AssertionError, RunError):  # what it started goes on
            self.stop()

    def stop(self) -> None:
        """Stop the server, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            stop_server(server)


def _stop_runs(server: Server) -> None:
    """Stop the runs that the server trains, as the page's button does."""
    for folder in run_folders(server.runs):
        run = read_run(folder)
        if run.status.live and run.run_json.get("kind") == RunKind.TRAINER:
            with contextlib.suppress(StoreError):  # it begins or ends just now
                send_command(folder, CommandName.STOP, {})
            wait_until(lambda folder=folder: not read_run(folder).status.live, 20)


def _emptied(folder: Path) -> bool:
    """Remove all from a folder; return False if a run that has just ended still writes there."""
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return not any(folder.glob("*"))


def _children(server: Server) -> list[psutil.Process]:
    """Return the processes that work for the server; the helpers of multiprocessing stay."""
    try:
        found = psutil.Process(server.process.pid).children(recursive=True)
        return [
            child
            for child in found
            if child.status() != psutil.STATUS_ZOMBIE
            and "from multiprocessing." not in " ".join(child.cmdline())
        ]
    except psutil.NoSuchProcess:
        return []
