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
from torch import Tensor, nn
from torch.utils.data import default_collate

from stepscope.run.status import shortage
from trainer.config import RunConfig
from trainer.custom_workload import (
    START,
    CustomWorkload,
    UserWorkloadError,
    place_in_user_code,
    user_workload,
)
from trainer.error_messages import RunFailedError
from trainer.workloads.task import Batch, Split, Task

MODULE = "user_workload_"  # unique prefix of the user's module name


class UserCodeError(RunFailedError):
    """An error of the user's file; the message names the line if there is one."""


def task(config: RunConfig) -> Task:
    """Return the task of the user's function. Raises UserCodeError."""
    try:
        given = user_workload()
    except UserWorkloadError as error:
        raise UserCodeError(str(error)) from None
    if given is None:
        raise UserCodeError(f"workload: no custom workload was given. Start the page with: {START}")
    with wrap_user_errors(given.path, f"{given} cannot be used"):
        build = getattr(load(given.path), given.function, None)
        if not callable(build):
            raise UserCodeError(
                f"workload: {given.path.name} has no function {given.function}. "
                "Name one that takes a RunConfig and returns a Task."
            )
        made = build(config)
    if not isinstance(made, Task):
        raise UserCodeError(
            f"workload: {given} must return a trainer.workloads.task.Task, got "
            f"{type(made).__name__}. Return Task(model=…, train=…, validation=…, loss=…)."
        )
    if not isinstance(made.model, nn.Module) or not callable(made.loss):
        raise UserCodeError(
            f"workload: {given} needs a Module as model and a function as loss, got "
            f"{type(made.model).__name__} and {type(made.loss).__name__}. Correct the Task."
        )
    return replace(
        made,
        train=_split(given, "train", made.train),
        validation=_split(given, "validation", made.validation),
        run_info={"data": f"of your own, {given}", **made.run_info, "user_workload": str(given)},
    )


def _split(given: CustomWorkload, name: str, data: Any) -> Split:
    if isinstance(data, Split):
        if data.length < 1:
            raise UserCodeError(f"workload: {name} has no samples. Check the Split.")
        return data
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserCodeError(
            f"workload: {name} of {given} must be a Split or a Dataset with a length and samples "
            f"by number, got {type(data).__name__}. An IterableDataset cannot be used."
        )
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


class UserFile:
    """The user's file; unpickling it in a worker runs the file, which defines its classes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.path,)


def _loaded(path: Path) -> UserFile:
    if f"{MODULE}{path.stem}" not in sys.modules:
        load(path)
    return UserFile(path)


@contextmanager
def wrap_user_errors(path: Path, what: str) -> Iterator[None]:
    """Raise UserCodeError with the line in `path`, or `what`, for an exception other than OOM."""
    try:
        yield
    except RunFailedError:
        raise
    except Exception as error:
        if shortage(error) is not None:
            raise
        place = place_in_user_code(error, path) or f"workload: {what}"
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
    form: tuple[tuple[torch.Size, torch.dtype], tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, dataset: Any, name: str, source: UserFile) -> CollatedDataset:
        """Return the split of a dataset; loads its first sample. Raises UserCodeError."""
        length = len(dataset)
        if length < 1:
            raise UserCodeError(f"workload: {name} has no samples. Check the dataset.")
        inputs, targets = _batch([dataset[0]], name)
        form = ((inputs.shape[1:], inputs.dtype), (targets.shape[1:], targets.dtype))
        return cls(source, dataset, name, length, form)

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64) as one batch. Raises UserCodeError."""
        with wrap_user_errors(self.source.path, f"a sample of {self.name} cannot be made"):
            return _batch([self.dataset[place] for place in indices.tolist()], self.name)

    def room(self, size: int) -> Batch:
        inputs, targets = (torch.empty((size, *shape), dtype=dtype) for shape, dtype in self.form)
        return inputs, targets


def _batch(samples: list[Any], name: str) -> Batch:
    """Collate samples into two tensors; float64, as of Python's numbers, becomes float32."""
    for sample in samples:
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise UserCodeError(
                f"workload: each sample of {name} must be a pair of input and target, got "
                f"{type(sample).__name__}. Return (input, target) from the dataset."
            )
    parts = []
    for part in default_collate(samples):
        if not isinstance(part, Tensor):
            raise UserCodeError(
                f"workload: inputs and targets of {name} must be tensors, arrays or numbers, got "
                f"{type(part).__name__}. Turn them into tensors in the dataset."
            )
        parts.append(part.float() if part.dtype is torch.float64 else part)
    return parts[0], parts[1]
