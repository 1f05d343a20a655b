"""Distributed checkpoints (DCP): a folder to which each rank writes its shards.

Any number of ranks can read it. DCP's metadata file is a pickle, which `dcp_metadata.py` reads
without running code.
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
"""Names of shard folders, such as `last.3.parts`, next to their checkpoint file."""
MAX_PICKLE_BYTES = 64 * 2**20  # without the tensors
_ALLOCATING = (b"\nbytearray\n", b"c_codecs\n")  # as a pickle names them, unlike names of layers


def check_archive(file: IO[bytes]) -> None:
    """Rewind the file; raises ValueError if `torch.save` cannot have written it.

    Compressed archives could inflate to any size, and pickles with `bytearray` or `_codecs` could
    allocate any length.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or sum(entry.file_size for entry in entries) > size:
                raise ValueError("it is compressed")
            pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
            if any(entry.file_size > MAX_PICKLE_BYTES for entry in pickles):
                raise ValueError("its pickle is too large")
            if any(name in archive.read(entry) for entry in pickles for name in _ALLOCATING):
                raise ValueError("it makes bytes")
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError("it is no archive of torch") from error
    file.seek(0)


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors to a folder; all ranks must call this. Raises OSError.

    Replicated tensors are those of rank 0, as batch norm statistics differ between ranks.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(dict(tensors), storage_writer=filesystem.FileSystemWriter(folder), planner=planner)
    except CheckpointException as error:  # raised on all ranks
        shutil.rmtree(folder, ignore_errors=True)
        reasons = {
            str(one[0] if isinstance(one, tuple) else one) for one in error.failures.values()
        }
        raise OSError(f"{folder.name} could not be written: {'; '.join(reasons)}") from None


def load_shards(
    folder: Path, room: Callable[[str, torch.Size, torch.dtype], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, each read into the tensor that `room` returns.

    Of a sharded tensor each rank reads its shard. Raises OSError, and ValueError for a damaged or
    foreign folder.
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
            # No communication: each rank finds its shards in the metadata.
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{folder.name} is damaged") from error
    return tensors


class _Reader(filesystem.FileSystemReader):
    """DCP's reader with safe metadata that names only files of its folder."""

    def _slice_file(self, file: Any, sinfo: filesystem._StorageInfo) -> Any:
        tensor = io.BufferedReader(_Slice(file, sinfo.offset, sinfo.length))
        check_archive(tensor)
        return tensor

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return read_list(Path(self.path))


class _Slice(io.RawIOBase):
    """A slice of a file as a file; unlike torch's it supports SEEK_END."""

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
