"""Untrusted run folders: nothing outside changes, nothing hangs or grows."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.hostile_folders import (
    FILES,
    FOLDERS,
    JSON_FILES,
    ROOT,
    RUN,
    STORES,
    SWEEP,
    Change,
    make_runs,
)

HANG_S = 2.0
"""Maximum CPU time of an operation."""
WAIT_S = 30.0
"""Silence after which an operation counts as hanging."""
GROWTH_BYTES = 200 * 2**20
NOBODY = 65534
USERS = {"root": None, "another user": NOBODY} if os.geteuid() == 0 else {"this user": None}

numbers = st.integers(0, 2**20)
DAMAGE = ["bytes", "cut", "sparse", "bomb", "deep", "large"]
changes = st.one_of(
    [
        st.builds(Change, st.sampled_from(kinds), st.sampled_from(names), numbers)
        for kinds, names in (
            (["fifo", "link", "folder", "mode"], FILES),
            (DAMAGE, FILES),
            (["value"], JSON_FILES),
            (["schema", "frame_bomb"], STORES),
            (["fifo", "link", "mode", "owner", "temporary_links"], FOLDERS),
        )
    ]
)


class Attacker:
    """A process that opens folders of runs; it is started again after one that hung."""

    def __init__(self, intact: Path, uid: int | None) -> None:
        self._arguments = [str(intact)] + ([str(uid)] if uid is not None else [])
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.open_hostile", *self._arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()
        self.intact_peak = max(one["peak_bytes"] for one in self._until_done("the start", 120))

    def _read(self, process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def attack(self, root: Path) -> list[dict[str, Any]]:
        """Return how each operation on the runs below `root` went."""
        assert self._process.stdin is not None
        print(root, file=self._process.stdin, flush=True)
        return self._until_done("attack", WAIT_S)

    def _until_done(self, name: str, wait_s: float) -> list[dict[str, Any]]:
        ended = []
        while True:
            try:
                line = self._lines.get(timeout=wait_s)
            except queue.Empty:
                self.restart(f"{name} hangs")
            if not line:
                self.restart(f"{name} ended the process")
            told = json.loads(line)
            if "done" in told:
                return ended
            name = told.get("begin", name)
            if "end" in told:
                ended.append(told)

    def restart(self, problem: str) -> None:
        """Fail the test, with a new process for the next folder."""
        self.close()
        self._start()
        pytest.fail(problem)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A folder of intact runs; pytest's own folders are closed to other users."""
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    root.chmod(0o755)
    make_runs(root / "intact")
    yield root / "intact"
    _delete(root)


@pytest.fixture(scope="module", params=list(USERS))
def attacker(request: pytest.FixtureRequest, template: Path) -> Iterator[tuple[Attacker, int]]:
    uid = USERS[request.param]
    intact = template.parent / f"intact-{uid}"
    shutil.copytree(template, intact)
    attacker = Attacker(intact, uid)
    yield attacker, os.geteuid() if uid is None else uid
    attacker.close()


REGRESSIONS = [
    *(("temporary_links", name, 0) for name in (RUN, f"lab/{SWEEP}")),
    *(("fifo", f"{RUN}/{name}", 0) for name in ("rank0.ring", "last.pt")),
    *(("fifo", f"{RUN}/rank0.sqlite{suffix}", 0) for suffix in ("-wal", "-journal")),
    ("fifo", f"lab/{SWEEP}/sweep.json", 0),
    ("link", f"{RUN}/rank0.ring", 1),
    ("link", f"lab/{SWEEP}/sweep.json", 1),
    ("link", f"lab/{SWEEP}/trials.jsonl", 0),
    ("link", STORES[0], 4),
    *(("sparse", f"{RUN}/{name}", 0) for name in ("rank0.ring", "profile-step-5-6.summary.json")),
    *(("schema", STORES[0], number) for number in (0, 2, 4, 8)),
    ("frame_bomb", STORES[0], 0),
    ("mode", RUN, 0),
]
"""Attacks that once worked, replayed at every run."""


@pytest.mark.timeout(3000)
def test_attacks_that_once_worked(attacker: tuple[Attacker, int], template: Path) -> None:
    for attack in REGRESSIONS:
        costs_itself_only(attacker, template, [Change(*attack)])


@given(changes=st.lists(changes, min_size=1, max_size=3))
@settings(
    deadline=None,
    max_examples=settings().max_examples // 4,  # each opens a folder in 40 ways: 0.4 s
    phases=(Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.timeout(3000)
def test_a_hostile_folder_costs_itself_only(
    attacker: tuple[Attacker, int], template: Path, changes: list[Change]
) -> None:
    costs_itself_only(attacker, template, changes)


def costs_itself_only(
    attacker: tuple[Attacker, int], template: Path, changes: list[Change]
) -> None:
    """Change a copy of the runs and open all of it."""
    process, uid = attacker
    runs, home = template.parent / "runs", template.parent / "home"
    for path in (runs, home):
        _delete(path)
    shutil.copytree(template, runs)
    home.mkdir()
    canary = home / ".bashrc"
    canary.write_text("echo hello\n")
    for path in (home, canary, runs, *runs.rglob("*")):
        os.chown(path, uid, uid)
    for change in changes:
        change.apply(runs, canary)
    before, foreign = _content(home), _content(runs, not_of=uid)
    told = process.attack(runs)
    assert _content(home) == before, "a file outside the runs was changed"
    assert _content(runs, not_of=uid) == foreign, "a folder of another user was changed"
    problems = [f"{one['end']}: {one['problem']}" for one in told if one["problem"]]
    assert not problems, "\n".join(problems)
    assert [one for one in told if one["cpu_s"] > HANG_S] == []
    growth = max(one["peak_bytes"] for one in told) - process.intact_peak
    if growth >= GROWTH_BYTES:
        process.restart(f"the process has grown by {growth} bytes")


def _delete(path: Path) -> None:
    if not path.exists():
        return
    for folder, names, _ in os.walk(path):
        for name in names:  # before os.walk opens it
            if not (Path(folder) / name).is_symlink():
                os.chmod(Path(folder) / name, 0o700)
    shutil.rmtree(path)


def _content(root: Path, not_of: int | None = None) -> dict[str, str]:
    """Return the hash of every regular file; `not_of`: in folders that a user does not own."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if path.is_symlink() or not path.is_file() or path.parent.stat().st_uid == not_of:
            continue
        large = status.st_size > 2**30
        found[str(path)] = (
            f"sparse {status.st_size} {status.st_mtime_ns}"
            if large
            else hashlib.sha256(path.read_bytes()).hexdigest()
        )
    return found
