"""Checkpoint files: whole or not there, and nothing foreign gets in."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from trainer.config import RunConfig, Workload
from trainer.training.accelerator import CpuAccelerator
from trainer.training.checkpoint import (
    CheckpointError,
    read_checkpoint,
    weights_bytes,
    write_checkpoint,
)
from trainer.training.distributed_checkpoint import save_shards
from trainer.training.state import TrainState


def test_a_checkpoint_comes_back_and_leaves_no_part(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(3.0)}, "position": {"step": 7}}
    size = write_checkpoint(tmp_path / "best.pt", state)
    assert size == (tmp_path / "best.pt").stat().st_size
    assert read_checkpoint(tmp_path / "best.pt")["position"] == {"step": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]
    weights = torch.load(io.BytesIO(weights_bytes(tmp_path / "best.pt")), weights_only=True)
    assert torch.equal(weights["w"], torch.arange(3.0))


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
    write_checkpoint(tmp_path / "last.pt", {"model": names})
    assert read_checkpoint(tmp_path / "last.pt")["model"].keys() == names.keys()


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


@pytest.mark.parametrize("kind", ["missing", "text", "empty", "truncated", "foreign"])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best.pt"
    if kind == "text":
        path.write_text("hello")
    elif kind == "empty":
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
        (Workload.DIGITS_MLP, {"width": 9, "dataset": "x", "custom_options": "y", "seed": 5}, None),
        (Workload.GPT, {"num_layers": 5}, "num_layers"),
        (Workload.GPT, {"context_length": 32}, "context_length"),
        (Workload.GPT, {"tie_embeddings": False}, "tie_embeddings"),
        (Workload.LINEAR, {"dataset": "other", "width": 9}, None),
        (Workload.LINEAR, {"seed": 5}, "seed"),
        (Workload.CUSTOM, {"custom_options": "wide"}, "custom_options"),
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


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {
    "model.0.weight": torch.arange(6.0).view(2, 3),
    "model.steps": torch.tensor(4),
    "optimizer.0.exp_avg": torch.ones(2, 3, dtype=torch.bfloat16),
}


def written(folder: Path) -> Path:
    parts = folder / "last.1.parts"
    save_shards(parts, TENSORS)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {0: {"lr": 1}}}}
    write_checkpoint(folder / "last.pt", state | {"parts": parts.name})
    return parts


def test_the_tensors_of_the_parts_come_back_as_those_of_one_file(tmp_path: Path) -> None:
    written(tmp_path)
    state = read_checkpoint(tmp_path / "last.pt")
    assert state["model"].keys() == {"0.weight", "steps"}
    assert torch.equal(state["model"]["0.weight"], TENSORS["model.0.weight"])
    assert state["model"]["steps"].item() == 4
    assert state["optimizer"]["state"][0]["lr"] == 1
    assert state["optimizer"]["state"][0]["exp_avg"].dtype is torch.bfloat16
    assert "parts" not in state


def test_a_list_of_tensors_cannot_change_the_classes_that_it_names(tmp_path: Path) -> None:
    """BUILD of a pickle sets attributes of any object, also of a class."""
    parts = written(tmp_path)

    def named(kind: Any) -> bytes:
        return f"c{kind.__module__}\n{kind.__qualname__}\n".encode()

    for kind in (PosixPath, metadata.Metadata, torch.Size, torch.serialization._get_layout):
        state = b"N}X\x04\x00\x00\x00evil" + named(OrderedDict) + b"s\x86"
        (parts / ".metadata").write_bytes(b"\x80\x02" + named(kind) + state + b"b.")
        with pytest.raises(CheckpointError, match="list of tensors is damaged"):
            read_checkpoint(tmp_path / "last.pt")
        assert not hasattr(kind, "evil")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"storage_data": None}, "no attribute 'items'"),
        ({"size": torch.Size([10**14])}, "the files have"),
        ({"size": (2.5,)}, "a whole number is missing"),
        ({"size": torch.Size([1] * 65)}, "65 dimensions"),
        ({"chunks": None}, "list is missing"),
        ({"length": 10**14}, "shorter than its header"),
    ],
)
def test_a_list_that_cannot_be_is_a_sentence(
    damage: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path) / ".metadata"
    found = pickle.loads(path.read_bytes())
    tensor = next(iter(found.state_dict_metadata.values()))
    place = next(iter(found.storage_data.values()))
    [(name, value)] = damage.items()
    target = next(one for one in (found, tensor, place) if hasattr(one, name))
    setattr(target, name, value)
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": []}, "cannot be read"),
        ({"model": {}, "optimizer": {"state": []}}, "cannot be read"),
        *(
            ({"parts": name}, "names no folder")
            for name in ("../other/last.1.parts", "/etc", "", 7)
        ),
    ],
)
def test_a_file_that_cannot_be_that_of_the_parts_is_refused(
    state: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written(tmp_path)
    write_checkpoint(tmp_path / "last.pt", {"parts": "last.1.parts", **state})
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("damage", ["list", "bomb", "file", "folder"])
def test_a_damaged_folder_is_a_sentence_and_runs_no_code(damage: str, tmp_path: Path) -> None:
    parts = written(tmp_path)
    if damage == "list":
        (parts / ".metadata").write_bytes(b"\x80\x04")
    elif damage == "bomb":
        (parts / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "made")))
    elif damage == "file":
        (parts / "__0_0.distcp").write_bytes(b"")
    else:
        os.rename(parts, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "made").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    parts = written(tmp_path)
    text = (parts / ".metadata").read_bytes()
    os.rename(parts / "__0_0.distcp", tmp_path / "_0_0.distcp")
    assert text.count(b"__0_0.distcp")
    (parts / ".metadata").write_bytes(text.replace(b"__0_0.distcp", b"../0_0.distc"))
    with pytest.raises(CheckpointError, match="files that it cannot have"):
        read_checkpoint(tmp_path / "last.pt")
