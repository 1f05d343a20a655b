"""The section of memory snapshots, without a browser: a real process opens a real small file."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunStatus
from tests.support.app_page import record
from tests.support.snapshots import REAL, live_block, snapshot

STEP_5 = "snapshot-step-5"
Section = Callable[[str], AppTest]


SECTION = """
from dashboard import services
from dashboard.views.memory_snapshots import snapshot_section
from stepscope.run import read_run

snapshot_section(read_run(services.get().folder({run_id!r})))
"""


@pytest.fixture
def section(server: services.Services) -> Section:
    def run(run_id: str) -> AppTest:
        app = AppTest.from_string(SECTION.format(run_id=run_id), default_timeout=60).run()
        assert not app.exception
        return app

    return run


def texts(app: AppTest) -> str:
    return " ".join(part.value for part in (*app.markdown, *app.caption, *app.warning))


def test_a_runs_snapshot_lists_live_allocations_with_their_stacks(
    section: Section, tmp_path: Path
) -> None:
    folder = record(tmp_path, "one", device="GPU-1")
    shutil.copy(REAL, folder / "snapshot-step-5.pickle")
    app = section("one")
    [table] = app.dataframe
    largest = table.value.iloc[0]
    assert list(table.value["Size"]) == sorted(table.value["Size"], reverse=True)
    assert (largest["Size"], largest["Blocks"]) == (32.0, 1)
    assert "record_snapshot.py:31" in largest["Allocated at"]


def test_two_snapshots_are_compared_by_stack(section: Section, tmp_path: Path) -> None:
    folder = record(tmp_path, "one", device="GPU-1")
    (folder / f"{STEP_5}.pickle").write_bytes(pickle.dumps(snapshot([live_block(2**20)])))
    more = snapshot([live_block(2**20), live_block(3 * 2**20, line=8)])
    (folder / "snapshot-step-10.pickle").write_bytes(pickle.dumps(more))
    app = section("one")
    app.selectbox[1].select_index(0).run()
    [changes] = [part.value for part in app.dataframe if "Change" in part.value]
    assert list(changes["Change"]) == [3.0]


def test_what_is_no_snapshot_is_refused(section: Section, tmp_path: Path) -> None:
    folder = record(tmp_path, "one", device="GPU-1")
    path = folder / "snapshot-step-5.pickle"
    path.write_bytes(pickle.dumps(os.getcwd))
    app = section("one")
    assert len(app.warning) == 1
    assert not app.dataframe
    path.write_bytes(pickle.dumps(snapshot([live_block(2**20)])))
    app.run()
    assert len(app.dataframe) == 1


def test_without_one_it_has_how_to_get_it(section: Section, tmp_path: Path) -> None:
    for status in (RunStatus.RUNNING, RunStatus.FINISHED):
        record(tmp_path, str(status), status, commands=["memory_snapshot"])
        app = section(str(status))
        assert not app.selectbox
        assert "`torch.cuda.memory._dump_snapshot`" in texts(app)
