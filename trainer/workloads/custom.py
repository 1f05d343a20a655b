"""A workload of the user's own: runs its file and makes a task of what its function returns.

The file is run anew for each run, so that a change takes effect at the next start. Modules beside
it can be imported; a module of the same name that is installed or ours comes first.
"""

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

LIKE = {torch.float64: torch.float32}
"""Types that collation gives and models do not take: Python's numbers have 64 bits."""
MODULE = "user_workload_"
"""The user's module is this and the name of its file; no other module has that name."""


class UserCodeError(RunFailedError):
    """The user's file cannot be used; the message names its line where it has one."""


def task(config: RunConfig) -> Task:
    """Return the task that the user's function makes. Raises UserCodeError."""
    given = _given()
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


def _given() -> CustomWorkload:
    try:
        given = user_workload()
    except UserWorkloadError as error:
        raise UserCodeError(str(error)) from None
    if given is None:
        raise UserCodeError(
            f"workload: no workload of your own was given. Start the page with: {START}"
        )
    return given


def _split(given: CustomWorkload, name: str, data: Any) -> Split:
    """The data as a Split."""
    if isinstance(data, Split):
        if data.length < 1:
            raise UserCodeError(f"workload: {name} has no samples. Look at the Split.")
        return data
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserCodeError(
            f"workload: {name} of {given} must be a Split or a Dataset with a length and samples "
            f"by number, got {type(data).__name__}. An IterableDataset cannot be used."
        )
    with wrap_user_errors(given.path, f"{name} of {given} cannot be used"):
        return CollatedDataset.of(data, name, UserFile(given.path))


def load(path: Path) -> ModuleType:
    """Run the file as a module whose classes can be pickled under its name."""
    name = f"{MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: no file beside it hides one of ours
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class UserFile:
    """The user's file, for workers: unpickling it runs the file, which makes its classes known."""

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
    """Raise UserCodeError, with file and line, for whatever the user's code at `path` raises.

    `what` is said where no line of the user's is known. A lack of memory stays what it is: it has
    an explanation of its own.
    """
    try:
        yield
    except RunFailedError:
        raise
    except Exception as error:
        if shortage(error) is not None:
            raise
        place = place_in_user_code(error, path) or f"workload: {what}"
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise UserCodeError(
            f"{place}: {type(error).__name__}: {said}. Correct the file and start again."
        ) from error


@dataclass(frozen=True, slots=True)
class CollatedDataset:
    """A dataset of (input, target) pairs. Workers get a copy of it, so it must be picklable.

    `source` comes first: when a worker unpickles it, the classes of `dataset` become known.
    """

    source: UserFile
    dataset: Any
    name: str  # "train" or "validation", for messages
    length: int
    form: tuple[tuple[torch.Size, torch.dtype], tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, dataset: Any, name: str, source: UserFile) -> CollatedDataset:
        """The split of this dataset, whose first sample is looked at. Raises UserCodeError."""
        length = len(dataset)
        if length < 1:
            raise UserCodeError(f"workload: {name} has no samples. Look at the dataset.")
        inputs, targets = _batch([dataset[0]], name)
        form = ((inputs.shape[1:], inputs.dtype), (targets.shape[1:], targets.dtype))
        return cls(source, dataset, name, length, form)

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch.

        Raises UserCodeError with the line of the user's file where a sample cannot be made.
        """
        with wrap_user_errors(self.source.path, f"a sample of {self.name} cannot be made"):
            return _batch([self.dataset[place] for place in indices.tolist()], self.name)

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""
        inputs, targets = (torch.empty((size, *shape), dtype=dtype) for shape, dtype in self.form)
        return inputs, targets


def _batch(samples: list[Any], name: str) -> Batch:
    """Samples as one batch of two tensors; 64-bit fractions become 32-bit ones."""
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
        parts.append(part.to(LIKE.get(part.dtype, part.dtype)))
    return parts[0], parts[1]
