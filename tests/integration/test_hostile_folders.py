"""Untrusted run folders: nothing outside changes, nothing hangs or grows."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.hostile_folders import KINDS, ROOT, RUN, STORE, SWEEP, Change, make_runs

MAX_CPU_S = 2.0
"""Maximum CPU time of an operation."""
GROWTH_BYTES = 200 * 2**20
NOBODY = 65534
USERS = {"root": None, "another user": NOBODY} if os.geteuid() == 0 else {"this user": None}

changes = st.builds(Change, st.sampled_from(KINDS), st.integers(0, 2**20))


class Attacker:
    """A process that opens folders of runs."""

    def __init__(self, intact: Path, uid: int | None) -> None:
        arguments = [str(intact)] + ([str(uid)] if uid is not None else [])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.open_hostile", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.intact_peak = max(one["peak_bytes"] for one in self._answers())

    def attack(self, root: Path) -> list[dict[str, Any]]:
        """Return how each operation on the runs below `root` went."""
        assert self.process.stdin is not None
        print(root, file=self.process.stdin, flush=True)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        assert self.process.stdout is not None
        told: list[dict[str, Any]] = []
        while (line := self.process.stdout.readline()) != "\n":
            assert line, f"hangs or ends the process after {told[-1:]}"
            told.append(json.loads(line))
        return told


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
    with suppress(BrokenPipeError), attacker.process:
        yield attacker, os.geteuid() if uid is None else uid
        attacker.process.kill()


REGRESSIONS = [
    *(Change("temporary_links", 0, name) for name in (RUN, f"lab/{SWEEP}")),
    *(Change("fifo", 0, f"{RUN}/{name}") for name in ("rank0.ring", "last.pt")),
    *(Change("fifo", 0, f"{RUN}/{STORE}{suffix}") for suffix in ("-wal", "-journal")),
    Change("fifo", 0, f"lab/{SWEEP}/sweep.json"),
    Change("link", 1, f"{RUN}/rank0.ring"),
    Change("link", 1, f"lab/{SWEEP}/sweep.json"),
    Change("link", 0, f"lab/{SWEEP}/trials.jsonl"),
    Change("link", 4, f"{RUN}/{STORE}"),
    Change("link", 0, f"{RUN}/crash-alert-sent"),
    *(
        Change("sparse", 0, f"{RUN}/{name}")
        for name in ("rank0.ring", "profile-step-5-6.summary.json")
    ),
    *(Change("schema", number, f"{RUN}/{STORE}") for number in (0, 2, 4, 8)),
    Change("frame_bomb", 0, f"{RUN}/{STORE}"),
    Change("mode", 0, RUN),
]
"""Attacks that once worked, replayed at every run."""


@pytest.mark.timeout(3000)
def test_attacks_that_once_worked(attacker: tuple[Attacker, int], template: Path) -> None:
    for attack in REGRESSIONS:
        costs_itself_only(attacker, template, [attack])


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
    problems = [f"{one['name']}: {one['problem']}" for one in told if one["problem"]]
    assert not problems, "\n".join(problems)
    assert [one for one in told if one["cpu_s"] > MAX_CPU_S] == []
    growth = max(one["peak_bytes"] for one in told) - process.intact_peak
    assert growth < GROWTH_BYTES


def _delete(path: Path) -> None:
    if not path.exists():
        return
    for folder, names, _ in os.walk(path):
        for name in names:  # before os.walk opens it
            if not (Path(folder) / name).is_symlink():
                os.chmod(Path(folder) / name, 0o700)
    shutil.rmtree(path)


def _content(root: Path, not_of: int | None = None) -> dict[str, Any]:
    """Return the content of every regular file; `not_of`: in folders that a user does not own."""
    found: dict[str, Any] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and path.parent.stat().st_uid != not_of:
            is_sparse = status.st_size > 2**30
            found[str(path)] = status.st_mtime_ns if is_sparse else path.read_bytes()
    return found
