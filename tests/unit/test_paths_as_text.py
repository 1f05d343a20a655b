"""Paths that the code holds as text are those of files that exist: no import finds a wrong one."""

from __future__ import annotations

from pathlib import Path

import stepscope
from stepscope.distributed.hangs import record
from stepscope.memory.oom import capture
from stepscope.memory.snapshots import open_snapshot

PACKAGE = Path(stepscope.__file__).parent


def test_the_packages_own_frames_are_known_by_its_folder() -> None:
    assert Path(capture._PACKAGE) == PACKAGE
    assert f"{PACKAGE}/" in record._LIBRARIES
    assert (open_snapshot.PACKAGES / "stepscope").samefile(PACKAGE)
