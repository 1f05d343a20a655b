"""Paths that the code holds as text are those of files that exist: no import finds a wrong one."""

from __future__ import annotations

from pathlib import Path

import stepscope
from stepscope.distributed.hangs import record
from stepscope.memory.oom import capture
from stepscope.memory.snapshots import open_snapshot
from trainer.runners import training_run

PACKAGE = Path(stepscope.__file__).parent
PROJECT = PACKAGE.parent


def test_a_failed_allocation_of_loading_is_known_by_its_files() -> None:
    assert len(training_run.DATA_FILES) == 2
    assert [name for name in training_run.DATA_FILES if not (PROJECT / name).is_file()] == []


def test_the_packages_own_frames_are_known_by_its_folder() -> None:
    assert Path(capture._PACKAGE) == PACKAGE
    assert f"{PACKAGE}/" in record._LIBRARIES
    assert (open_snapshot.PACKAGES / "stepscope").samefile(PACKAGE)
