"""Rows are read back at any resolution, from few frames, and commits are atomic."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stepscope.cli import main
from stepscope.store import STORE_NAME, SeriesBlock, StoreError, StoreReader, StoreWriter
from stepscope.store.blocks import Event
from stepscope.store.final_values import typical
from stepscope.store.reader import send_command
from stepscope.store.schema import SCHEMA_VERSION
from tests.support.run_folders import block_of_rows, make_run, make_store


def make_rows(start: int, stop: int, keys: Sequence[str] = ("a",)) -> SeriesBlock:
    steps = np.arange(start, stop, dtype=float)
    return SeriesBlock.raw(keys, 1000.0 + steps / 10, steps + 1, np.vstack([steps] * len(keys)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StoreWriter]:
    writer = StoreWriter(tmp_path / STORE_NAME)
    yield writer
    writer._connection.close()


def write(writer: StoreWriter, total: int, batch: int = 37) -> None:
    for start in range(0, total, batch):
        with writer.transaction():
            writer.append("steps", "", make_rows(start, min(total, start + batch)))


@pytest.mark.parametrize("total", [1, 15, 16, 255, 256, 257, 8200])
def test_every_resolution_covers_every_row(tmp_path: Path, writer: StoreWriter, total: int) -> None:
    write(writer, total)
    with StoreReader(tmp_path) as reader:
        (info,) = reader.series()
        assert info.rows == total
        for bucket in (1, 2, 16, 64, 1024):
            block = reader.read(info.id, 0, info.rows, bucket)
            assert len(block) == -(-total // bucket)
            assert block.count.sum() == total
            assert (block.low[0, 0], block.high[0, -1]) == (0, total - 1)
            assert block.mean[0] @ block.count[0] == pytest.approx(total * (total - 1) / 2)


def test_a_long_run_reads_few_frames_at_any_length(tmp_path: Path, writer: StoreWriter) -> None:
    read = []
    for _ in range(3):
        write(writer, 50_000, 50_000)
        with StoreReader(tmp_path) as reader:
            rows = reader.series()[0].rows
            bucket = 1 << max(0, (rows // 400).bit_length())
            seen: list[str] = []
            reader._connection.set_trace_callback(seen.append)
            block = reader.read(1, 0, rows, bucket)
            read.append(len(seen))
        assert len(block) <= 500
    assert max(read) <= 5  # one query a level


def test_a_metric_may_appear_at_any_row(tmp_path: Path, writer: StoreWriter) -> None:
    write(writer, 700)
    with writer.transaction():
        writer.append("steps", "", make_rows(700, 1100, ("a", "late")))
    with StoreReader(tmp_path) as reader:
        block = reader.read(1, 0, 1100, 16)
    assert block.keys == ("a", "late")
    assert block.count[1].sum() == 400
    assert np.isnan(block.mean[1, 0])


def test_rows_between_is_exact(tmp_path: Path, writer: StoreWriter) -> None:
    write(writer, 2000)
    with StoreReader(tmp_path) as reader:
        assert reader.rows_between(1, "step", 100, 612) == (99, 612)
        assert reader.rows_between(1, "time", 1009.9, 1061.1) == (99, 612)
        assert reader.rows_between(1, "time", -5, 1e12) == (0, 2000)


def test_rows_out_of_order_have_no_falling_axis(tmp_path: Path, writer: StoreWriter) -> None:
    for number in (2.0, 1.0, 3.0):
        with writer.transaction():
            rows = SeriesBlock.raw(("a",), np.array([number]), np.array([number]), np.ones((1, 1)))
            writer.append("steps", "", rows)
    with StoreReader(tmp_path) as reader:
        block = reader.read(1, 0, 3, 1)
    assert block.ts.tolist() == block.step.tolist() == [2.0, 2.0, 3.0]


def test_a_failed_transaction_can_be_repeated(tmp_path: Path, writer: StoreWriter) -> None:
    write(writer, 600)
    connection = writer._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    noise = np.random.default_rng(0).random((1, 40_000))
    big = SeriesBlock.raw(("a",), np.arange(40_000.0), np.arange(40_000.0), noise)
    with pytest.raises(sqlite3.OperationalError, match="full"), writer.transaction():
        writer.append("steps", "", big)
    connection.execute("PRAGMA max_page_count = 1000000")
    for rows in (make_rows(600, 700), big):
        with writer.transaction():
            writer.append("steps", "", rows)
    with StoreReader(tmp_path) as reader:
        assert [(s.stream, s.rows) for s in reader.series()] == [("steps", 40_700)]
        assert reader.read(1, 0, 700, 1).mean[0].tolist() == list(range(700))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([9.0], 9.0), ([9.0, 1.0], 1.0), ([9.0] * 10 + [1.0, 1.0, 1.0, 1.0, 6.0] * 18, 2.0)],
    ids=["one step", "the first step", "the first tenth, and stalls between steps"],
)
def test_a_typical_time_leaves_the_warm_up_out(seconds: list[float], expected: float) -> None:
    rows = block_of_rows([(float(i), i, {"a": one}) for i, one in enumerate(seconds)])
    assert typical(rows, "a") == pytest.approx(expected)
    assert typical(rows, "b") is None


def test_events_come_after_an_id_newest_kept(tmp_path: Path, writer: StoreWriter) -> None:
    with writer.transaction():
        for i in range(5):
            writer.add_event(Event(float(i), i, 1, "mark", "", {"before": i}))
    with StoreReader(tmp_path) as reader:
        assert [e.data["before"] for e in reader.events(2, kind="mark")] == [2, 3, 4]
        assert [e.id for e in reader.events(0, limit=2)] == [4, 5]
        assert reader.events(kind="nan") == []


def test_commands_are_taken_once(tmp_path: Path, writer: StoreWriter) -> None:
    first = send_command(tmp_path, "empty_cache", {})
    assert writer.take_commands() == [(first, "empty_cache", "{}")]
    assert writer.take_commands() == []


def test_unusable_stores_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="recorded nothing"), StoreReader(tmp_path):
        pass
    path = tmp_path / STORE_NAME
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="not a usable Stepscope store"), StoreReader(tmp_path):
        pass
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE frames (x)")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    with pytest.raises(StoreError, match="no such table"), StoreReader(tmp_path) as reader:
        reader.series()
    with pytest.raises(StoreError, match="File exists"):
        StoreWriter(path)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_a_store_of_another_version_is_refused_in_a_sentence(
    tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, status="finished")
    make_store(folder)
    with closing(sqlite3.connect(folder / STORE_NAME)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = (folder / STORE_NAME).read_bytes()
    sentence = f"{folder.name}: the store has version {version} "
    with pytest.raises(StoreError, match=sentence), StoreReader(folder):
        pass
    with pytest.raises(StoreError, match=sentence):
        send_command(folder, "stop", {})
    with pytest.raises(StoreError, match=sentence):
        StoreWriter(folder / STORE_NAME, reopen=True)
    assert main(["diagnose", str(folder)]) == 1
    assert sentence in capsys.readouterr().err
    assert (folder / STORE_NAME).read_bytes() == before
