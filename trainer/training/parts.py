"""A checkpoint's tensors in a folder that all ranks write: torch's distributed checkpoint.

Each rank writes what it has, and any number of ranks can read it. torch lists the tensors in a
pickle, which could run code: `parts_list.py` reads it so that it cannot.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.training.parts_list import read_list

NAME = re.compile(r"(best|last|step-[0-9]{1,12})\.[0-9]{1,9}\.parts")
"""Folders of parts lie beside the checkpoint that names them: `last.3.parts`."""


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors; all ranks have to call this. Raises OSError.

    What each rank has as a whole is rank 0's: the statistics of batch norm are a rank's own.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # else some are another rank's
    try:
        save(dict(tensors), storage_writer=filesystem.FileSystemWriter(folder), planner=planner)
    except CheckpointException as error:  # what happened on one rank comes to all
        shutil.rmtree(folder, ignore_errors=True)
        reasons = {
            str(one[0] if isinstance(one, tuple) else one) for one in error.failures.values()
        }
        raise OSError(f"{folder.name} could not be written: {'; '.join(reasons)}") from None


def read_parts(
    folder: Path, room: Callable[[str, torch.Size, torch.dtype], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, each in what `room` returns for it.

    Of a tensor that is spread over ranks each reads its own part. Raises OSError, and ValueError
    for a folder that holds something else.
    """
    reader = _Reader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: room(name, entry.size, entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # Without a meeting of the ranks: each finds in the list what it needs.
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{folder.name} is damaged") from error
    return tensors


class _Reader(filesystem.FileSystemReader):
    """torch's reader, with a list that cannot run code and names files of its folder alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return read_list(Path(self.path))
