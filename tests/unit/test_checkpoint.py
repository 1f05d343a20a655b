"""Checkpoint files: whole or not there, and nothing foreign gets in."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import RunConfig, Workload
from trainer.training.accelerator import CpuAccelerator
from trainer.training.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from trainer.training.state import TrainState


def test_a_failed_write_keeps_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"step": 1})

    def full(*_: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data.pkl")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"last\.pt could not be written"):
        write_checkpoint(path, {"step": 2})
    assert read_checkpoint(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_a_layer_may_have_the_name_of_a_module(tmp_path: Path) -> None:
    names = dict.fromkeys(("audio_codecs.weight", "bytearray.weight", "_codecs"), torch.ones(1))
    size = write_checkpoint(tmp_path / "last.pt", {"model": names})
    assert size == (tmp_path / "last.pt").stat().st_size
    assert read_checkpoint(tmp_path / "last.pt")["model"] == names


class Bomb:
    """Makes a folder in whatever process unpickles it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["plain pickle", "torch's file"])
def test_a_hostile_file_runs_no_code(tmp_path: Path, form: str) -> None:
    path, exploded = tmp_path / "best.pt", tmp_path / "exploded"
    if form == "plain pickle":
        path.write_bytes(pickle.dumps(Bomb(exploded), protocol=2))
    else:
        write_checkpoint(path, {"model": Bomb(exploded)})
    with pytest.raises(CheckpointError, match="damaged or no checkpoint"):
        read_checkpoint(path)
    assert not exploded.exists()


@pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "foreign"])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best.pt"
    if kind == "empty":
        path.touch()
    elif kind == "truncated":
        write_checkpoint(path, {"model": {"w": torch.zeros(1000)}})
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(
        CheckpointError, match=r"resume_from: .*best\.pt .*Choose another checkpoint\."
    ):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("workload", "changes", "refused"),
    [
        (Workload.DIGITS_MLP, {"width": 9, "dataset": "x", "seed": 5}, None),
        (Workload.GPT, {"num_layers": 5}, "num_layers"),
    ],
)
def test_settings_are_compared_where_the_workload_reads_them(
    workload: Workload, changes: dict[str, Any], refused: str | None
) -> None:
    def make(config: RunConfig) -> TrainState:
        return TrainState(config, torch.nn.Linear(2, 1), CpuAccelerator())

    config = RunConfig(workload=workload)
    state = make(config).state_dict()
    ours = make(replace(config, **changes))
    if refused is None:
        ours.load(state)
        return
    with pytest.raises(CheckpointError, match=f"made with {refused} "):
        ours.load(state)
