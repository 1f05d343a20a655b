"""Makes a task of what the function of the user's own file returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from trainer.config import RunConfig
from trainer.custom_workload import START, CustomWorkload, UserWorkloadError, user_workload
from trainer.workloads.custom_file import UserCodeError, UserFile, load, wrap_user_errors
from trainer.workloads.dataset_split import CollatedDataset, is_dataset
from trainer.workloads.task import Split, Task


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
    if not is_dataset(data):
        raise UserCodeError(
            f"workload: {name} of {given} must be a Split or a Dataset with a length and samples "
            f"by number, got {type(data).__name__}. An IterableDataset cannot be used."
        )
    with wrap_user_errors(given.path, f"{name} of {given} cannot be used"):
        return CollatedDataset.of(data, name, UserFile(given.path))
