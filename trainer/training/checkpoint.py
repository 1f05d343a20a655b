"""Checkpoint files in the run folder: `best.pt`, `last.pt` and `step-N.pt` (Save checkpoint).

Files are replaced atomically, and read with `weights_only`, so that a foreign file cannot run code.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist

from stepscope.common.files import atomic_replace, open_regular_file
from stepscope.common.formatting import format_bytes
from stepscope.host.usage import container
from trainer.errors import RunFailedError
from trainer.training.rank_info import TrainerRank

FORMAT = "stepscope-checkpoint-1"
MODEL, OPTIMIZER = "model", "optimizer"  # keys of a state
MAX_PICKLE_BYTES = 64 * 2**20  # without the tensors
_ALLOCATING = (b"\nbytearray\n", b"c_codecs\n")  # as a pickle names them, unlike names of layers


class CheckpointError(RunFailedError):
    """An unusable checkpoint; the message has a remedy."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> int:
    """Write tensors and plain values atomically; return the bytes. Raises OSError."""
    try:
        with atomic_replace(path) as file:
            torch.save({"format": FORMAT, **state}, file)
            return file.seek(0, os.SEEK_END)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # from the GPU, not the disk
    except RuntimeError as error:  # torch's zip writer on a full disk
        raise OSError(f"{path.name} could not be written: {str(error).splitlines()[0]}") from error


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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint on the CPU. Raises CheckpointError."""
    name = f"{path.parent.name}/{path.name}"
    try:
        with open(open_regular_file(path), "rb") as file:
            check_archive(file)
            free = container().within(psutil.virtual_memory().available)
            if (size := os.fstat(file.fileno()).st_size) > free:
                raise CheckpointError(
                    f"resume_from: {name} needs {format_bytes(size)} of memory, the host has "
                    f"{format_bytes(free)}. End other programs."
                )
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            if state["format"] != FORMAT:
                raise ValueError(f"its format is {state['format']}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"resume_from: {name} cannot be read ({error.strerror or error}). Choose another "
            "checkpoint."
        ) from error
    except Exception as error:  # unpickling a damaged file raises nearly every kind
        raise CheckpointError(
            f"resume_from: {name} is damaged or no checkpoint of Stepscope. Choose another "
            "checkpoint."
        ) from error
    return state


def read_on_first_rank(path: Path, ranks: TrainerRank) -> dict[str, Any]:
    """Return a checkpoint; on other ranks than 0 without the tensors of model and optimizer.

    All ranks must call this: rank 0 reads and broadcasts. Raises CheckpointError on rank 0.
    """
    state = {} if ranks.rank else read_checkpoint(path)
    if not ranks.distributed:
        return state
    tensors = {MODEL: state.pop(MODEL, {}), OPTIMIZER: state.pop(OPTIMIZER, {})}
    received = [state]
    dist.broadcast_object_list(received, src=0)
    return received[0] | tensors
