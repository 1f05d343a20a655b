"""pytest plugin: ends a test that hangs, and fails a run in which an unexpected test skips."""

from __future__ import annotations

import faulthandler
import fnmatch
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ERRORS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption(
        "--hang-grace",
        type=float,
        default=30.0,
        metavar="S",
        help="end a process whose test goes on for S seconds after its timeout",
    )
    group.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="fail the run if a test skips that no pattern in FILE names",
    )


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[_ERRORS] = os.dup(sys.__stderr__.fileno())  # pytest does not capture this one


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    """End the process, with the stacks of its threads, where the timeout cannot end its test."""
    later = settings.timeout + item.config.getoption("--hang-grace")
    faulthandler.dump_traceback_later(later, exit=True, file=item.config.stash[_ERRORS])
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer() -> Iterator[None]:
    """Let the process live on after its test has ended."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@functools.cache
def _shares_fixtures(file: Path) -> bool:
    """Return True if the tests of a file share a fixture, which only one worker is to set up."""
    conftest = file.with_name("conftest.py")
    texts = [path.read_text("utf-8") for path in (file, conftest) if path.exists()]
    return any('scope="module"' in text for text in texts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler for `--dist loadgroup`, of single tests and of files that share fixtures.

    pytest-xdist 3.8 ignores its mark `xdist_group` under pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 (a run may do without xdist)

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _shares_fixtures(config.rootpath / file) else nodeid

        def remove_node(self, node: Any) -> str | None:
            """Return the test during which a worker died; its group goes on with the next one.

            pytest-xdist 3.8 gives that test to the next worker, which dies of it as well.
            """
            left = self._unfinished(self.assigned_work.pop(node))
            if not left:
                return None
            group = next(iter(left.values()))
            crashed = next(test for test, done in group.items() if not done)
            group[crashed] = True
            self.workqueue.update(self._unfinished(left))
            for other in self.assigned_work:
                self._reschedule(other)
            return str(crashed)

        @staticmethod
        def _unfinished(groups: dict[str, dict[str, bool]]) -> dict[str, dict[str, bool]]:
            return {name: tests for name, tests in groups.items() if not all(tests.values())}

        def schedule(self) -> None:
            """Give each worker a second test or the end: it starts a test once it has the next.

            pytest-xdist 3.8 can leave a worker that replaces a crashed one with a single test.
            """
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

    return Groups(config, log)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which a test has skipped that no pattern of the file names."""
    file = session.config.getoption("--allowed-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if file is None or reporter is None:  # a worker has no reporter
        return
    lines = [line.split("#")[0].strip() for line in file.read_text("utf-8").splitlines()]
    for report in reporter.stats.get("skipped", ()):
        if not any(fnmatch.fnmatchcase(report.nodeid, line) for line in lines if line):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            reporter.write_line(f"\nmay not skip: {report.nodeid}: {reason}", red=True)
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
