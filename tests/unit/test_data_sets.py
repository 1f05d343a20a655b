"""Which data sets are offered, and that a name leads nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.common.config_issue import ConfigError
from trainer.config import RunConfig, Workload, defaults
from trainer.workloads import datasets as sets
from trainer.workloads.datasets import MAKE_DIGITS, data_path, data_problem, form_of


def files(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_tables_and_class_folders_are_found_and_nothing_else(tmp_path: Path) -> None:
    files(
        tmp_path,
        *("digits/train.csv", "digits/validation.csv", "digits/images/0.png"),
        *("caltech/labels.csv", "caltech/images/cat/1.jpg", "caltech/images/dog/1.jpg"),
        *("parted/train/a/1.png", "parted/train/b/1.png", "parted/val/a/1.png"),
        *("beside/a/1.png", "beside/b/1.png", "beside/labels.csv"),
        *("alone.csv", "one-class/a/1.png", ".hidden/train.csv"),
        *("a/b/c/d/too-deep.csv", "a/b/deep.csv"),
    )
    (tmp_path / "link.csv").symlink_to(tmp_path / "alone.csv")
    (tmp_path / "linked").symlink_to(tmp_path / "digits")
    assert sets.data_sets(tmp_path) == [
        "a/b/deep.csv",
        "alone.csv",
        "beside",
        "beside/labels.csv",
        "caltech/images",
        "caltech/labels.csv",
        "digits",
        "parted",
    ]
    for name in sets.data_sets(tmp_path):
        assert replace(RunConfig(), dataset=name).dataset == name
        assert data_path(tmp_path, name) == tmp_path / name


def test_only_names_that_the_field_may_have_are_offered_and_not_too_many(tmp_path: Path) -> None:
    assert sets.data_sets(tmp_path / "missing") == []
    assert form_of(tmp_path / "missing") is None
    files(tmp_path, "<b>.csv", "a;b.csv", "-x.csv", "new\nline.csv", "ok.csv")
    assert sets.data_sets(tmp_path) == ["ok.csv"]
    files(tmp_path, *(f"{number}.csv" for number in range(sets.OFFERED + 20)))
    assert len(sets.data_sets(tmp_path)) == sets.OFFERED


def test_a_link_out_of_the_data_folder_leads_nowhere(tmp_path: Path) -> None:
    root = tmp_path / "data"
    files(tmp_path, "data/digits/train.csv", "secret/train.csv")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "within").symlink_to(root / "digits")
    (root / "circle").symlink_to(root / "circle")
    assert data_path(root, "within") == root / "digits"
    for name in ("out", "out/train.csv", "circle", "../secret", "", "missing"):
        with pytest.raises(ConfigError):
            data_path(root, name)


def test_missing_data_are_a_problem_with_the_command_that_makes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sets.VARIABLE, str(tmp_path))
    config = defaults(Workload.IMAGES)
    problem = data_problem(config)
    assert problem is not None
    assert problem.field == "dataset"
    assert f"{MAKE_DIGITS} {tmp_path}/digits" in problem.remedy
    files(tmp_path, "mine.csv")
    assert data_problem(replace(config, dataset="mine.csv")) is None
