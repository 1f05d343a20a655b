"""One server for many tests: it starts each of them without runs."""

from __future__ import annotations

import contextlib
import shutil

import psutil
import pytest

from stepscope.recorder.recorder import CommandName
from stepscope.run import RunKind, read_run, run_folders
from stepscope.store import StoreError
from stepscope.store.reader import send_command
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
        assert not self._names & names, "the server knows a run of this name: choose another"
        self._names |= names
        try:
            _stop_runs(server)
            wait_until(lambda: server.process.poll() is not None or not _children(server), 20)
        except AssertionError:  # a process that it started goes on
            self.stop()
            return
        if server.process.poll() is None:
            for path in server.runs.glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            self._server = None

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
