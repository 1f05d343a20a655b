"""A workload of the user's own: what it may be, and where its errors are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dashboard.arguments import take_arguments
from stepscope.common.config_issue import ConfigError
from tests.support.child_process import run_python
from tests.support.training_runs import losses_on_one_batch
from trainer.config import RunConfig, Workload, defaults
from trainer.training.error_messages import describe_failure
from trainer.workloads import datasets
from trainer.workloads.build import WORKLOADS
from trainer.workloads.custom import CollatedDataset, UserCodeError, UserFile
from trainer.workloads.custom_file import (
    VARIABLE,
    choose,
    user_problem,
    user_workload,
)
from trainer.workloads.task import Task, TensorSplit

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLE = PROJECT / "examples" / "own_workload.py"
SOURCE = UserFile(EXAMPLE)
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test ends with the environment and without the modules that it loaded."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith(("user_workload_", "beside_it"))]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write this as the user's file and choose its function `build`."""

    def file(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        choose(f"{path}:build")
        return path

    return file


def make(**changes: Any) -> Task:
    config = replace(defaults(Workload.CUSTOM), **changes)
    return WORKLOADS[Workload.CUSTOM](config)


HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer.workloads.task import Task, TensorSplit

data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) % 2)
"""


def returning(**parts: str) -> str:
    given = {
        "model": "nn.Linear(1, 2)",
        "train": "data",
        "validation": "data",
        "loss": "nn.CrossEntropyLoss()",
    } | parts
    call = ", ".join(f"{name}={text}" for name, text in given.items())
    return f"{HEAD}\ndef build(config):\n    return Task({call})\n"


def test_the_example_trains() -> None:
    choose(f"{EXAMPLE}:build")
    torch.manual_seed(0)
    task = make()
    losses = losses_on_one_batch(task, replace(defaults(Workload.CUSTOM), learning_rate=0.01), 64)
    assert losses[-1] < 0.9 * losses[0]
    assert task.run_info["user_workload"] == "own_workload.py:build"


def test_choosing_a_workload_loads_no_torch() -> None:
    code = (
        "import sys; from trainer.workloads.custom_file import choose, user_problem;"
        f"choose({str(EXAMPLE) + ':build'!r});"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "text", ["mine.py", "mine.py:", "mine.txt:build", ":build", "mine.py:no-name"]
)
def test_what_is_no_file_and_function_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be path.py:function"):
        choose(text)
    assert user_workload() is None


def test_problems_of_the_choice(write: Write) -> None:
    config = defaults(Workload.CUSTOM)
    assert user_problem(config) is not None
    assert user_problem(RunConfig()) is None
    path = write("")
    assert user_problem(config) is None
    path.unlink()
    assert "there is no file" in str(user_problem(config))


BROKEN = [
    ("def build(config):\n    return 1 / 0", "mine.py, line 2, in build: ZeroDivisionError: div"),
    ("x = (", "mine.py, line 1: SyntaxError: '(' was never closed"),
    ("build = 3", "mine.py:build cannot be used: TypeError: 'int' object is not callable"),
    ("", "mine.py:build cannot be used: AttributeError: module"),
    (
        returning(train="3"),
        "train of mine.py:build cannot be used: TypeError: object of type 'int'",
    ),
    (returning(train="[]"), "train has no samples"),
    (returning(train="[(1, 2, 3)]"), "each sample of train must be a pair of input and target"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_what_is_wrong_in_the_file_is_one_sentence_with_its_line(
    write: Write, text: str, words: str
) -> None:
    write(text)
    with pytest.raises(UserCodeError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_its_folder_can_be_imported_but_hide_none_of_ours(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "beside_it.py").write_text("def broken():\n    raise ValueError('no')\n")
    write("import beside_it\ndef build(config):\n    return beside_it.broken()\n")
    with pytest.raises(UserCodeError, match=r"^beside_it\.py, line 2, in broken: ValueError: no\."):
        make()
    for name in ("trainer.py", "json.py"):
        (tmp_path / name).write_text("raise RuntimeError('wrong module')")
    write("import json\n" + returning(train="TensorSplit.of(*data.tensors)"))
    assert isinstance(make().train, TensorSplit)
    write("def build(config):\n    raise MemoryError")
    with pytest.raises(MemoryError):  # it has an explanation of its own
        make()


def test_an_error_while_training_is_told_with_its_line(write: Write) -> None:
    path = write(
        HEAD
        + "\nclass Model(nn.Linear):\n    def forward(self, x):\n        return x @ x\n"
        + returning(model="Model(1, 2)").removeprefix(HEAD)
    )
    task = make()
    inputs, _ = task.train.take(torch.arange(4))
    with pytest.raises(RuntimeError) as caught:
        task.model(inputs)
    outcome = describe_failure(caught.value, defaults(Workload.CUSTOM))
    assert " at mine.py, line 11, in forward" in str(outcome.reason)
    path.unlink()
    outcome = describe_failure(caught.value, defaults(Workload.CUSTOM))
    assert str(outcome.reason).startswith("Training raised RuntimeError: ")


def test_lists_of_pairs_of_arrays_and_numbers_are_datasets() -> None:
    pairs = [(np.full((2, 3), place, np.uint8), place / 4) for place in range(4)]
    split = CollatedDataset.of(pairs, "train", SOURCE)
    inputs, targets = split.take(torch.tensor([3, 1]))
    assert (inputs.shape, inputs.dtype) == ((2, 2, 3), torch.uint8)
    assert (targets.tolist(), targets.dtype) == ([0.75, 0.25], torch.float32)


def test_the_page_takes_it_from_its_command_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(datasets.VARIABLE, "some/where")
    monkeypatch.chdir(tmp_path)
    take_arguments(["/usr/bin/pytest", "--workload", "nothing"])
    assert user_workload() is None
    take_arguments(["app.py", "--workload", f"{EXAMPLE}:build"])
    found: Any = user_workload()
    assert found.path == EXAMPLE
    assert datasets.data_root() == tmp_path / "some" / "where"
    for arguments in (["--workload", "x.py"], ["--work", "x.py:build"]):
        with pytest.raises(SystemExit, match="2"):
            take_arguments(["app.py", *arguments])
