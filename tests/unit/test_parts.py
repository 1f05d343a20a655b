"""Folders of a distributed checkpoint: what comes back, and what is not run when it is read."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from trainer.training.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from trainer.training.distributed_checkpoint import load_shards, save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {
    "model.0.weight": torch.arange(6.0).view(2, 3),
    "model.steps": torch.tensor(4),
    "optimizer.0.exp_avg": torch.ones(2, 3, dtype=torch.bfloat16),
}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


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


def test_a_list_of_tensors_that_would_run_code_is_refused(tmp_path: Path) -> None:
    parts, made = written(tmp_path), tmp_path / "made"
    (parts / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(CheckpointError, match="does not belong there"):
        read_checkpoint(tmp_path / "last.pt")
    assert not made.exists()
    pickle.loads((parts / ".metadata").read_bytes())
    assert made.exists(), "torch's own reader would have run it"


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
        ({"storage_data": []}, "no attribute 'items'"),
        ({"storage_data": None}, "no attribute 'items'"),
        ({"state_dict_metadata": 3}, "no attribute 'items'"),
        ({"size": torch.Size([10**14])}, "the files have"),
        ({"size": (2.5,)}, "a whole number is missing"),
        ({"size": torch.Size([1] * 65)}, "65 dimensions"),
        ({"chunks": None}, "list is missing"),
        ({"length": 10**14}, "shorter than it says"),
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


@pytest.mark.parametrize("state", [{"model": []}, {"model": {}, "optimizer": {"state": []}}])
def test_a_file_that_has_no_place_for_the_parts_is_a_sentence(
    state: dict[str, Any], tmp_path: Path
) -> None:
    parts = written(tmp_path)
    write_checkpoint(tmp_path / "last.pt", state | {"parts": parts.name})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("name", ["../other/last.1.parts", "/etc", "last.parts", "", 7])
def test_a_checkpoint_names_a_folder_beside_it(name: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "last.pt", {"model": {}, "optimizer": {}, "parts": name})
    with pytest.raises(CheckpointError, match="names no folder"):
        read_checkpoint(tmp_path / "last.pt")


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    parts = written(tmp_path)
    text = (parts / ".metadata").read_bytes()
    os.rename(parts / "__0_0.distcp", tmp_path / "_0_0.distcp")
    assert text.count(b"__0_0.distcp")
    (parts / ".metadata").write_bytes(text.replace(b"__0_0.distcp", b"../0_0.distc"))
    with pytest.raises(CheckpointError, match="files that it cannot have"):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("damage", ["list", "file", "folder"])
def test_a_damaged_folder_is_a_sentence(damage: str, tmp_path: Path) -> None:
    parts = written(tmp_path)
    if damage == "list":
        (parts / ".metadata").write_bytes(b"\x80\x04")
    elif damage == "file":
        (parts / "__0_0.distcp").write_bytes(b"")
    else:
        os.rename(parts, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "last.pt")


def test_what_the_disk_refuses_is_an_os_error_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        save_shards(tmp_path / "file" / "last.1.parts", TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_tensors_are_read_into_the_room_for_them(tmp_path: Path) -> None:
    room = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    found = load_shards(written(tmp_path), lambda name, size, dtype: room[name])
    for name, tensor in TENSORS.items():
        assert found[name] is room[name]
        assert torch.equal(room[name], tensor)
