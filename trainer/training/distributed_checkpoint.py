"""Distributed checkpoints (DCP): a folder to which each rank writes its shards.

Any number of ranks can read it. DCP's metadata file is a pickle, which could run code and set
attributes of the classes that it names. So it is unpickled into placeholders, whose fields are
validated and converted to torch's classes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepscope.common.files import read_regular_file

NAME = re.compile(r"(best|last|step-[0-9]{1,12})\.[0-9]{1,9}\.parts")
"""Names of shard folders, such as `last.3.parts`, next to their checkpoint file."""
MAX_PICKLE_BYTES = 64 * 2**20  # without the tensors
_ALLOCATING = (b"\nbytearray\n", b"c_codecs\n")  # as a pickle names them, unlike names of layers
METADATA = ".metadata"
_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
MAX_METADATA_BYTES = 64 * 2**20  # a tensor takes about 300 bytes per rank
MAX_DIMENSIONS = 64
DAMAGED = (
    *(pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Exceptions of unpickling foreign or damaged files."""
_Kind = TypeVar("_Kind")
Room = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Returns the tensor to read into, by name, shape and dtype."""


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
    """Write tensors to a folder, replicas of rank 0; all ranks must call this. Raises OSError."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(dict(tensors), storage_writer=filesystem.FileSystemWriter(folder), planner=planner)
    except CheckpointException as error:  # raised on all ranks
        shutil.rmtree(folder, ignore_errors=True)
        reasons = {
            str(one[0] if isinstance(one, tuple) else one) for one in error.failures.values()
        }
        raise OSError(f"{folder.name} could not be written: {'; '.join(reasons)}") from None


def load_shards(folder: Path, room: Room) -> dict[str, Tensor]:
    """Return a folder's tensors, read into those of `room`. Raises OSError and ValueError."""
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
        file.seek(sinfo.offset)
        tensor = io.BytesIO(file.read(sinfo.length))
        check_archive(tensor)
        return tensor

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return read_list(Path(self.path))


class _Entry:
    """Stand-in for an object of the metadata; `state` is its pickled state.

    A pickle cannot change this class: its BUILD calls `__setstate__`, which fails for a class. It
    cannot change builtin types or torch's dtypes either.
    """

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


_ENTRIES: dict[Any, type[_Entry]] = {
    kind: type(kind.__name__, (_Entry,), {})
    for kind in (
        *(metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata),
        *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta),
        *(filesystem._StorageInfo, PosixPath),
    )
}
_STAND_INS: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): stand_in
    for kind, stand_in in (
        *_ENTRIES.items(),
        (metadata._MEM_FORMAT_ENCODING, int),
        (torch.Size, tuple),
        (OrderedDict, dict),
        (torch.serialization._get_layout, str),
    )
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def read_list(folder: Path) -> metadata.Metadata:
    """Return the metadata of a checkpoint folder. Raises OSError and ValueError.

    The listed tensors fit in the files of the folder, so a caller can allocate them.
    """
    with os.scandir(folder) as entries:
        sizes = {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        }
    data = read_regular_file(folder / METADATA, MAX_METADATA_BYTES)
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        return _checked(_fields(found, metadata.Metadata), sizes)
    except (*DAMAGED, MemoryError) as error:
        raise ValueError(f"the list of tensors is damaged: {error}") from error


def _checked(fields: Mapping[str, Any], sizes: Mapping[str, int]) -> metadata.Metadata:
    places = {_index(key): _place(place, sizes) for key, place in fields["storage_data"].items()}
    tensors = {
        _name(name): _tensor(entry)
        for name, entry in fields["state_dict_metadata"].items()
        if isinstance(entry, _ENTRIES[metadata.TensorStorageMetadata])
    }
    needed = sum(
        math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors.values()
    )
    found = sum(size for name, size in sizes.items() if _FILE.fullmatch(name))
    if needed > found:
        raise ValueError(f"it names tensors of {needed:,} bytes, and the files have {found:,}")
    planned = {name: (name,) for name in tensors}
    return metadata.Metadata(dict(tensors), planner_data=planned, storage_data=places)


def _tensor(entry: Any) -> metadata.TensorStorageMetadata:
    fields = _fields(entry, metadata.TensorStorageMetadata)
    dtype = _of(fields["properties"], _ENTRIES[metadata.TensorProperties]).state[0]
    chunks = [_fields(one, metadata.ChunkStorageMetadata) for one in _of(fields["chunks"], list)]
    return metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=_of(dtype, torch.dtype)),
        _size(fields["size"]),
        [
            metadata.ChunkStorageMetadata(_size(one["offsets"]), _size(one["sizes"]))
            for one in chunks
        ],
    )


def _index(entry: Any) -> metadata.MetadataIndex:
    fields = _fields(entry, metadata.MetadataIndex)
    offset, index = fields.get("offset"), fields.get("index")
    return metadata.MetadataIndex(
        _name(fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _whole(index),
    )


def _place(entry: Any, sizes: Mapping[str, int]) -> filesystem._StorageInfo:
    fields = _fields(entry, filesystem._StorageInfo)
    name, offset, length = _name(fields["relative_path"]), fields["offset"], fields["length"]
    if not _FILE.fullmatch(name) or fields.get("transform_descriptors"):
        raise ValueError("it names files that it cannot have")
    if _whole(offset) + _whole(length) > sizes.get(name, 0):
        raise ValueError(f"{name} is shorter than its header states")
    return filesystem._StorageInfo(name, offset, length)


def _size(value: Any) -> torch.Size:
    size = torch.Size([_whole(length) for length in _of(value, tuple)])
    if len(size) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(size)} dimensions")
    return size


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"a whole number is missing, got {repr(value)[:40]}")
    return value


def _name(value: Any) -> str:
    return _of(value, str)


def _fields(entry: Any, kind: Any) -> dict[str, Any]:
    return _of(_of(entry, _ENTRIES[kind]).state, dict)


def _of(value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__.strip('_')} is missing, got {type(value).__name__}")
    return value
