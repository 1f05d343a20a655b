"""Paths that the code holds as text are those of files that exist: no import finds a wrong one."""

from __future__ import annotations

from pathlib import Path

import stepscope
from stepscope.distributed.hangs import record
from stepscope.host import child_process
from stepscope.memory.oom import capture
from stepscope.profiling import chrome_trace, phase_ranges, trace_stats
from stepscope.session import command_server
from trainer.training import train

PACKAGE = Path(stepscope.__file__).parent
PROJECT = PACKAGE.parent


def test_a_failed_allocation_of_loading_is_known_by_its_files() -> None:
    assert len(train.DATA_FILES) == 2
    assert [name for name in train.DATA_FILES if not (PROJECT / name).is_file()] == []


def test_the_packages_own_frames_are_known_by_its_folder() -> None:
    assert Path(capture._PACKAGE) == PACKAGE
    assert f"{PACKAGE}/" in record._LIBRARIES
    assert (child_process.PACKAGES / "stepscope").samefile(PACKAGE)


def test_a_trace_names_our_functions_by_their_file_now_and_formerly() -> None:
    for path in (command_server.__file__, "/x/stepscope/session/commands.py"):
        assert chrome_trace._OWN(f"{path}(12): serve")
    for path in (phase_ranges.__file__, "/x/stepscope/profiling/ranges.py"):
        assert trace_stats._CALL.search(f"{path}(12): forward")
