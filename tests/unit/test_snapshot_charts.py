"""A snapshot as figures and rows of tables, and the files that the page offers."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from dashboard.charts.snapshot import (
    change_rows,
    history_figure,
    map_figure,
    module_rows,
    stack_rows,
    where,
)
from dashboard.run_files import SnapshotLibrary, snapshots, upload_name
from stepscope.memory.snapshots.load import load
from stepscope.memory.snapshots.summary import SnapshotSummary, difference, summarize
from tests.support.snapshots import REAL, action, live_block, snapshot


@pytest.fixture(scope="module")
def real() -> SnapshotSummary:
    return summarize(load(REAL))


def test_bands_stack_up_to_what_is_live(real: SnapshotSummary) -> None:
    [history] = real.histories
    figure = history_figure(real, history)
    stacked = [trace for trace in figure["data"] if "stackgroup" in trace]
    sums = [sum(values) for values in zip(*(trace["y"] for trace in stacked), strict=True)]
    assert sums == pytest.approx([live / 2**20 for live in history.live], abs=0.02)
    assert len({trace["line"]["color"] for trace in stacked}) == len(stacked)
    assert figure["layout"]["yaxis"]["ticksuffix"] == " MiB"
    assert figure["data"][-1]["name"] == "Reserved"
    assert stacked[0]["x"] == list(history.columns)
    [note] = figure["layout"]["annotations"]
    [span, *_] = history.spans
    assert (note["text"], note["x"]) == ("second step", history.columns[span.first])
    assert len(figure["layout"]["shapes"]) == len(history.spans)
    json.dumps(figure, allow_nan=False)


def test_the_map_has_every_byte_of_its_segments(real: SnapshotSummary) -> None:
    [memory] = real.devices
    figure = map_figure(real, memory)
    assert sum(sum(trace["x"]) for trace in figure["data"]) == pytest.approx(36.0, abs=0.01)
    assert len(figure["layout"]["yaxis"]["ticktext"]) == memory.segments == 3
    assert "840 KiB split" in figure["layout"]["yaxis"]["ticktext"][0]
    used = next(trace for trace in figure["data"] if trace["name"] == "in use")
    assert any("record_snapshot.py" in text for text in used["text"])


def test_tables_have_the_line_of_the_program_and_the_whole_stack(real: SnapshotSummary) -> None:
    rows = stack_rows(real, [site for site in real.sites if site.device == 0])
    assert rows[0]["Size"] == 32.0
    assert rows[0]["Allocated at"] == "record_snapshot.py:31 in forward"
    assert rows[0]["Module"] == "torch.nn.modules.linear, called at record_snapshot.py:31"
    assert rows[0]["Stack"][0] == "linear.py:134 in forward"
    [history] = real.histories
    assert sum(row["Size"] for row in stack_rows(real, history.at_peak)) <= history.peak / 2**20
    assert [row["Module"] for row in module_rows(real, 0)][-1] == "No module in the stack"
    assert module_rows(real, 1) == []
    assert where(()) == "No stack recorded"


def test_foreign_names_are_text_in_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    bad = [{"filename": "<b>x</b>.py", "line": 1, "name": "<img src=x>"}]
    content = snapshot([live_block(8, frames=bad)], [action("alloc", 512, 8, frames=bad)])
    path.write_bytes(pickle.dumps(content))
    summary = summarize(load(path))
    texts = json.dumps(
        [
            history_figure(summary, summary.histories[0]),
            map_figure(summary, summary.devices[0]),
        ]
    )
    assert "<img" not in texts
    assert "&lt;img" in texts


def test_changes_have_a_sign(real: SnapshotSummary, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot([live_block(2**20)])))
    rows = change_rows(difference(real, summarize(load(path))))
    assert rows[0]["Change"] == -32.0
    assert {row["Change"] > 0 for row in rows} == {True, False}


# --- files ----------------------------------------------------------------------------------------


def test_step_10_comes_before_step_9_and_links_are_left_out(tmp_path: Path) -> None:
    for name in ("snapshot-step-9.pickle", "snapshot-step-10.pickle", "other.pickle"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "snapshot-step-11.pickle").symlink_to(tmp_path / "other.pickle")
    files = snapshots(tmp_path)
    assert [file.name for file in files] == ["snapshot-step-10.pickle", "snapshot-step-9.pickle"]
    assert {file.run for file in files} == {tmp_path.name}


def test_the_folder_of_snapshots_lists_plain_files_newest_first(tmp_path: Path) -> None:
    offered = SnapshotLibrary(tmp_path)
    assert offered.others() == []
    offered.folder.mkdir()
    for number, name in enumerate(
        ["my file (ä).PICKLE", "b.pickle", "a.pkl", "c.txt", ".hidden.pickle", "a\nb.pickle"]
    ):
        (offered.folder / name).write_bytes(b"x")
        os.utime(offered.folder / name, (number, number))
    (offered.folder / "folder.pickle").mkdir()
    assert [file.name for file in offered.others()] == ["a.pkl", "b.pickle", "my file (ä).PICKLE"]


def test_an_upload_never_replaces_a_file(tmp_path: Path) -> None:
    offered = SnapshotLibrary(tmp_path)
    names = [offered.keep("../x.pickle", content) for content in (b"1", b"2", b"3")]
    assert names == ["x.pickle", "x-2.pickle", "x-3.pickle"]
    assert [(offered.folder / name).read_bytes() for name in names] == [b"1", b"2", b"3"]


def test_what_is_no_snapshot_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = SnapshotLibrary(tmp_path)
    monkeypatch.setattr("dashboard.run_files.MAX_FILE_BYTES", 1000)
    for name, size, told in (
        ("a.exe", 1, "must end in .pickle"),
        ("b.pickle", 0, "must have 1 to 1,000 bytes, got 0"),
        ("b.pickle", 1001, "must have 1 to 1,000 bytes, got 1,001"),
    ):
        with pytest.raises(ValueError, match=told):
            offered.keep(name, bytes(size))
    assert offered.keep("b.pickle", bytes(1000)) == "b.pickle"
    assert [file.name for file in offered.others()] == ["b.pickle"]


@pytest.mark.parametrize("name", ["", ".pickle/..", "a", "a.pickle.exe", "/etc/passwd"])
def test_a_name_that_is_no_snapshots_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name: must end in \.pickle"):
        upload_name(name)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../x.pickle", "x.pickle"),
        (".pickle", "snapshot.pickle"),
        ("ä ö.PKL", "snapshot.pkl"),
        ("a" * 300 + ".pickle", "a" * 100 + ".pickle"),
        ("run/../snap\x00shot.pickle", "run-..-snap-shot.pickle"),
    ],
)
def test_an_upload_gets_a_plain_name(name: str, kept: str) -> None:
    assert upload_name(name) == kept
