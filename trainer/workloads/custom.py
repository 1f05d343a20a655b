"""Custom workloads: executes the user's file in each run, and validates the Task it returns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from stepscope.common.config_issue import ConfigError
from stepscope.run.status import shortage
from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.workloads.custom_file import (
    START,
    CustomWorkload,
    place_in_user_code,
    user_workload,
)
from trainer.workloads.task import Batch, Split, Task

MODULE = "user_workload_"  # unique prefix of the user's module name


class UserCodeError(RunFailedError):
    """An error of the user's file; the message names the line if there is one."""


def task(config: RunConfig) -> Task:
    """Return the task of the user's function. Raises UserCodeError."""
    try:
        given = user_workload()
    except ConfigError as error:
        raise UserCodeError(str(error)) from None
    if given is None:
        raise UserCodeError(f"workload: no custom workload was given. Start the page with: {START}")
    with wrap_user_errors(given.path, f"{given} cannot be used"):
        made = getattr(load(given.path), given.function)(config)
    if not isinstance(made, Task):
        raise UserCodeError(
            f"workload: {given} must return a trainer.workloads.task.Task, got "
            f"{type(made).__name__}. Return Task(model=…, train=…, validation=…, loss=…)."
        )
    return replace(
        made,
        train=_split(given, "train", made.train),
        validation=_split(given, "validation", made.validation),
        run_info={"data": f"of your own, {given}", **made.run_info, "user_workload": str(given)},
    )


def _split(given: CustomWorkload, name: str, data: Any) -> Split:
    """Return a Split, also of a Dataset. Raises UserCodeError."""
    if isinstance(data, Split):
        return data
    with wrap_user_errors(given.path, f"{name} of {given} cannot be used"):
        return CollatedDataset.of(data, name, UserFile(given.path))


def load(path: Path) -> ModuleType:
    """Run the file as a module with picklable classes."""
    name = f"{MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that no file of the user hides a module
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class UserFile:
    """The user's file; unpickling it in a worker runs the file, which defines its classes."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.path,)


def _loaded(path: Path) -> UserFile:
    if f"{MODULE}{path.stem}" not in sys.modules:
        load(path)
    return UserFile(path)


@contextmanager
def wrap_user_errors(file: Path, what: str) -> Iterator[None]:
    """Raise UserCodeError with the line of the file, or `what`, for any error but out of memory."""
    try:
        yield
    except RunFailedError:
        raise
    except Exception as error:
        if shortage(error) is not None:
            raise
        place = place_in_user_code(error, file.parent) or f"workload: {what}"
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise UserCodeError(
            f"{place}: {type(error).__name__}: {text}. Correct the file and start again."
        ) from error


@dataclass(frozen=True, slots=True)
class CollatedDataset:
    """A picklable dataset of pairs; unpickling `source`, the first field, defines its classes."""

    source: UserFile
    dataset: Any
    name: str  # "train" or "validation", for messages
    length: int

    @classmethod
    def of(cls, dataset: Any, name: str, source: UserFile) -> CollatedDataset:
        """Return the split of a dataset; loads its first sample. Raises UserCodeError."""
        if not len(dataset):
            raise UserCodeError(f"workload: {name} has no samples. Check the dataset.")
        split = cls(source, dataset, name, len(dataset))
        split.take(torch.zeros(1, dtype=torch.int64))
        return split

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64) as one batch. Raises UserCodeError."""
        with wrap_user_errors(self.source.path, f"a sample of {self.name} cannot be made"):
            return _batch([self.dataset[place] for place in indices.tolist()], self.name)


def _batch(samples: list[Any], name: str) -> Batch:
    """Collate samples into two tensors; float64, as of Python's numbers, becomes float32."""
    parts = default_collate(samples)
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        raise UserCodeError(
            f"workload: each sample of {name} must be a pair of input and target, each a tensor, "
            "array or number. Return such pairs from the dataset."
        )
    inputs, targets = (part.float() if part.dtype is torch.float64 else part for part in parts)
    return inputs, targets
