"""The section of profiles on the live page, without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Selectbox

from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.app_page import OpenPage, record
from tests.support.profiles import write_profile


def job(root: Path) -> Path:
    """A job of two ranks, the second on another host with a name that Markdown would read."""
    folder = record(root, "one", world_size=2)
    recorder = Recorder(folder, name="train", rank=1)
    recorder.describe(rank=1, world_size=2, host="*node*")
    recorder.close(RunStatus.FINISHED)
    return folder


def chooser(app: AppTest, key: str) -> Selectbox[Any]:
    return next(box for box in app.selectbox if box.key == key)


def test_the_profile_of_each_rank_can_be_chosen(page: OpenPage, tmp_path: Path) -> None:
    folder = job(tmp_path)
    write_profile(folder, 5, 6)
    for rank in (0, 1):
        write_profile(folder, 10, 12, rank)
    (folder / "profile-step-10-12.rank1.json.gz").write_bytes(b"trace")
    app = page(run="one", tab="profile")
    ranks = chooser(app, "profile_rank")
    assert "CUDA self" in app.dataframe[0].value.columns
    assert not any("ui.perfetto.dev" in part.value for part in app.markdown)
    assert [option.split(" · ")[0] for option in ranks.options] == ["Rank 0", "Rank 1"]
    ranks.select_index(1).run()
    assert any("ui.perfetto.dev" in part.value for part in app.markdown)


def test_the_only_rank_with_a_profile_is_named_and_an_invalid_summary_refused(
    page: OpenPage, tmp_path: Path
) -> None:
    folder = job(tmp_path)
    write_profile(folder, 5, 6, 1)
    app = page(run="one", tab="profile")
    (only,) = chooser(app, "profile_rank").options
    assert only.startswith("Rank 1")
    (folder / "profile-step-5-6.rank1.summary.json").unlink()
    (folder / "profile-step-5-6.summary.json").write_text("[]")
    app = page(run="one", tab="profile")
    assert len(app.warning) == 1
    assert len(app.dataframe) == 0
