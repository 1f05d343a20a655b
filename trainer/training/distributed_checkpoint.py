"""A checkpoint's tensors in a folder that all ranks write: torch's distributed checkpoint.

Each rank writes what it has, and any number of ranks can read it. torch lists the tensors in a
pickle, which could run code: `dcp_metadata.py` reads it so that it cannot.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.training.dcp_metadata import read_list

NAME = re.compile(r"(best|last|step-[0-9]{1,12})\.[0-9]{1,9}\.parts")
"""Folders of parts lie beside the checkpoint that names them: `last.3.parts`."""

_PICKLE_BYTES = 64 * 2**20
"""Size of a file's pickle up to which it is read; the tensors lie outside of it."""
_MAKERS = (b"\nbytearray\n", b"c_codecs\n")
"""How a pickle names them; the name of a layer may have the same word in it."""


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError for a file that `torch.save` cannot have written; then rewind it.

    Such a file may inflate to any size: `torch.save` compresses nothing, and its tensors fill the
    file. `bytearray` and `_codecs`, which torch would call for any length, are refused as well.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or sum(entry.file_size for entry in entries) > size:
                raise ValueError("it is compressed")
            pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
            if any(entry.file_size > _PICKLE_BYTES for entry in pickles):
                raise ValueError("its pickle is too large")
            if any(name in archive.read(entry) for entry in pickles for name in _MAKERS):
                raise ValueError("it makes bytes")
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError("it is no archive of torch") from error
    file.seek(0)


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
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


def load_shards(
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

    def _slice_file(self, file: Any, sinfo: filesystem._StorageInfo) -> Any:
        tensor = io.BufferedReader(_Slice(file, sinfo.offset, sinfo.length))
        check_archive(tensor)
        return tensor

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return read_list(Path(self.path))


class _Slice(io.RawIOBase):
    """A part of a file, as a file. That of torch cannot be sought from its end."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = int(self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)]))
        self._at += count
        return count
