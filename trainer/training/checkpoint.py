"""Checkpoint files in the run folder: `best.pt`, `last.pt` and `step-N.pt` (Save checkpoint).

Files are replaced atomically, and read with `weights_only`, so that a foreign file cannot run code.
With FSDP the tensors are in a folder next to the file (`distributed_checkpoint.py`).
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from stepscope.common.files import atomic_replace, open_regular_file
from stepscope.common.formatting import format_bytes
from stepscope.host.usage import container
from trainer.error_messages import RunFailedError
from trainer.training.distributed_checkpoint import DAMAGED, NAME, Room, check_archive, load_shards

FORMAT = "stepscope-checkpoint-1"
MODEL, OPTIMIZER, PARTS = "model", "optimizer", "parts"
"""Keys of a state; `parts` is the name of the folder with the tensors of the other two."""


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


def _on_host(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)


def read_checkpoint(path: Path, room: Room = _on_host) -> dict[str, Any]:
    """Return a checkpoint on the CPU, its shards read into `room`. Raises CheckpointError."""
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
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"resume_from: {name} cannot be read ({error.strerror or error}). Choose another "
            "checkpoint."
        ) from error
    except (*DAMAGED, AssertionError) as error:
        raise CheckpointError(
            f"resume_from: {name} is damaged or no checkpoint at all. Choose another checkpoint."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"resume_from: {name} was not written by Stepscope. Choose another checkpoint."
        )
    if PARTS in state:
        _add_parts(state, path.parent, room)
    return state


def _add_parts(state: dict[str, Any], folder: Path, room: Room) -> None:
    """Insert the tensors of the shard folder into the state."""
    name = state.pop(PARTS)
    try:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError("it names no folder of parts")
        for key, tensor in load_shards(folder / name, room).items():
            kind, _, rest = key.partition(".")
            if kind == MODEL:
                state[MODEL][rest] = tensor
            else:
                number, _, entry = rest.partition(".")
                state[OPTIMIZER]["state"].setdefault(int(number), {})[entry] = tensor
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"resume_from: the parts of {folder.name}'s checkpoint cannot be read ({error}). "
            "Choose another checkpoint."
        ) from error


def weights_bytes(path: Path) -> bytes:
    """Return the model weights as a `.pt` file for `load_state_dict`. Raises CheckpointError."""
    buffer = io.BytesIO()
    torch.save(read_checkpoint(path).get(MODEL), buffer)
    return buffer.getvalue()
