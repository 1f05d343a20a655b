"""How a training becomes a checkpoint and goes on from one, on however many ranks.

The weights of DDP are the same on all ranks, and rank 0 writes them, in the file that a run of one
process writes. With FSDP each rank writes its part into a folder beside the file, which names it:
no rank ever holds the whole model. Both are read by runs of any kind and number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import Strategy
from trainer.training.checkpoint import MODEL, OPTIMIZER, PARTS, write_checkpoint
from trainer.training.distributed_checkpoint import NAME, save_shards
from trainer.training.state import TrainState


def save(path: Path, training: TrainState) -> int | None:
    """Write a checkpoint and return its bytes, None on a rank other than 0. Raises OSError.

    With FSDP all ranks have to call it at the same step; else only rank 0 does something.
    """
    training.saved += 1
    if training.config.strategy is not Strategy.FSDP:
        return None if training.ranks.rank else write_checkpoint(path, training.state_dict())
    state, tensors = _taken_apart(training.state_dict())
    parts = path.with_name(f"{path.stem}.{training.saved}.parts")
    save_shards(parts, tensors)
    if training.ranks.rank:
        return None
    try:
        size = write_checkpoint(path, state | {PARTS: parts.name})
    except OSError:
        shutil.rmtree(parts, ignore_errors=True)  # no file names it, and the disk may be full
        raise
    for former in path.parent.glob(f"{path.stem}.*.parts"):
        if former != parts and NAME.fullmatch(former.name):
            shutil.rmtree(former, ignore_errors=True)
    return size + sum(file.stat().st_size for file in parts.iterdir())


def room(training: TrainState, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return where a tensor of a checkpoint is read to: this rank's part of it, or all of it."""
    kind, _, key = name.partition(".")
    if kind == MODEL:
        like = training.model.state_dict().get(key)
    else:
        number = int(key.partition(".")[0])
        weights = training.optimizer.param_groups[0]["params"]
        like = weights[number] if number < len(weights) else None
    if isinstance(like, Tensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def _taken_apart(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state without the tensors of model and optimizer, and these by name."""
    tensors = {f"{MODEL}.{name}": value for name, value in state[MODEL].items()}
    values: dict[int, dict[str, Any]] = {}
    for number, entries in state[OPTIMIZER]["state"].items():
        values[number] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}.{number}.{name}"] = value
            else:
                values[number][name] = value
    return state | {MODEL: {}, OPTIMIZER: state[OPTIMIZER] | {"state": values}}, tensors
