"""The page's download of a checkpoint's weights, whose file anybody may have written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from stepscope.run import RunError
from trainer.runners.weights import read_weights
from trainer.training.checkpoint import write_checkpoint


def test_the_weights_come_through_a_process_of_their_own(tmp_path: Path) -> None:
    tensor = torch.arange(3_000_000.0)
    write_checkpoint(tmp_path / "best.pt", {"model": {"w": tensor}, "optimizer": {}})
    weights = torch.load(io.BytesIO(read_weights(tmp_path / "best.pt")), weights_only=True)
    assert torch.equal(weights["w"], tensor)


def test_a_file_that_breaks_its_reader_breaks_that_process_alone(tmp_path: Path) -> None:
    """Hashing a tuple in a tuple in a tuple … overruns the stack."""
    path = tmp_path / "best.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("best/data.pkl", b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x01s.")
        archive.writestr("best/version", b"3\n")
        archive.writestr("best/byteorder", b"little")
    with pytest.raises(RunError, match="reading it ended the process"):
        read_weights(path)
