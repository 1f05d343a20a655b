"""Whole runs on image files: decoded here or in workers, with broken ones among them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.child_process import run_python
from tests.support.run_values import events, run_json
from tests.support.training_runs import refused, train
from trainer.config import RunConfig, Workload, defaults
from trainer.workloads import images
from trainer.workloads.datasets import VARIABLE


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder after the command has been run as a user runs it."""
    root = tmp_path_factory.mktemp("data")
    done = run_python("-m", "trainer.workloads.digit_images", **{VARIABLE: str(root)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "stepscope ui" in done.stdout
    return root


@pytest.fixture
def digits(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of 60 of these digits that a test may damage."""
    folder = tmp_path / "data" / "few"
    (folder / "images").mkdir(parents=True)
    rows = (written / "digits" / "train.csv").read_text().splitlines()[:61]
    (folder / "labels.csv").write_text("\n".join(rows))
    for row in rows[1:]:
        name = row.split(",")[0]
        (folder / name).write_bytes((written / "digits" / name).read_bytes())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "data"))
    return folder


def few(**changes: Any) -> RunConfig:
    base = replace(defaults(Workload.IMAGES), dataset="few/labels.csv", num_threads=1, epochs=2)
    return replace(base, **{"batch_size": 16, "image_size": 8, "horizontal_flip": False, **changes})


def test_the_written_digits_are_learned(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(written))
    config = replace(defaults(Workload.IMAGES), epochs=4, horizontal_flip=False, num_threads=1)
    train(tmp_path, "run", config)
    last = [event for event in events(tmp_path / "run") if event.kind == "epoch"][-1]
    found = re.search(r"accuracy ([0-9.]+)%", last.text)
    assert found is not None
    assert float(found[1]) > 94
    info = run_json(tmp_path / "run")
    assert re.findall(r"\d(?:[\d,]*\d)?", info["data"]) == ["1,438", "10", "359"]
    assert info["classes"] == list("0123456789")


def test_images_that_are_kept_are_decoded_once_and_give_the_same_run(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    decode_image = images.decode_image

    def counted(path: Path, size: int) -> Any:
        asked.append(path.name)
        return decode_image(path, size)

    monkeypatch.setattr(images, "decode_image", counted)
    decodes, losses = {}, {}
    for kept in (False, True):
        asked.clear()
        config = few(dataset_on_device=kept, horizontal_flip=True, epochs=3)
        losses[kept] = train(tmp_path, f"run-{kept}", config)
        decodes[kept] = len(asked)
    assert np.array_equal(losses[False], losses[True])
    # One image more for the shapes: to count FLOPs, and of each split to keep it.
    assert decodes == {False: 3 * 60 + 1, True: 60 + 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_ends_the_run_with_one_sentence(
    digits: Path, tmp_path: Path, workers: int
) -> None:
    (digits / "images").joinpath(sorted(os.listdir(digits / "images"))[0]).write_bytes(b"no")
    folder = tmp_path / "run"
    reason = refused(tmp_path, "run", few(num_workers=workers))
    assert re.match(r"labels\.csv, line \d+: images/\d+\.png: it is no image", reason)
    assert "Traceback" not in (folder / "run.json").read_text()
    assert not any("Traceback" in f"{event.text}{event.data}" for event in events(folder))
