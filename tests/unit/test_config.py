"""RunConfig: what it refuses, its URL and JSON forms, and what devices cannot do."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.common.config_issue import ConfigError
from tests.support.train_devices import GPU
from trainer.config import (
    SETTINGS,
    OptimizerImpl,
    Precision,
    RunConfig,
    Runner,
    Workload,
    checkpoints,
    defaults,
)

INVALID: dict[str, tuple[Any, ...]] = {
    "epochs": (0,),
    "width": (4,),
    "batch_size": (True,),
    "learning_rate": (float("nan"),),
    "precision": ("fp8",),
    "device": ("cuda:0",),
    "resume_from": ("../secret/best.pt", "run/../../best.pt", "run/other.pt"),
    "pin_memory": (1,),
    "dataset": (
        *("/etc", "..", "a/../../b", "a/./b", "a//b", "a\\b", "a\0b", "a\n", ".hidden"),
        "a/" * 8 + "b",
    ),
}


@pytest.mark.parametrize("field", INVALID)
def test_it_refuses_nonsense_with_field_value_and_remedy(field: str) -> None:
    for value in INVALID[field]:
        with pytest.raises(
            ConfigError, match=f"^{re.escape(SETTINGS[field].label)} must be "
        ) as it:
            replace(RunConfig(), **{field: value})
        assert it.value.problem.remedy


def test_data_may_have_the_names_that_people_give() -> None:
    for path in ("", "digits", "Caltech 101/labels (1).csv", "räume/images_2", "a..b/1.csv"):
        assert replace(RunConfig(), dataset=path).dataset == path


@pytest.mark.parametrize("workload", list(Workload))
def test_json_and_url_forms_come_back_equal(workload: Workload) -> None:
    on_gpu = defaults(workload, GPU)
    changed = replace(
        on_gpu,
        precision=Precision.BF16,
        epochs=7,
        learning_rate=0.125,
        optimizer_impl=OptimizerImpl.FOR_LOOP,
        runner=Runner.PROCESS,
        num_workers=2,
        pin_memory=not on_gpu.pin_memory,
        resume_from="20261121-101500-digits-cnn-ab12/step-300.pt",
    )
    for config in (defaults(workload, "cpu"), changed):
        assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert RunConfig.from_params(config.to_params()) == (config, [])


def test_the_url_holds_only_what_differs() -> None:
    assert RunConfig().to_params() == {}
    assert replace(RunConfig(), epochs=3, optimizer_impl=OptimizerImpl.FOR_LOOP).to_params() == {
        "epochs": "3",
        "optimizer_impl": "for-loop",
    }


HOSTILE: dict[str, set[str]] = {
    "": {"dataset"},
    "-1": set(),
    "٣": {"dataset"},
    "nan": {"dataset"},
    "9" * 5000: set(),
    "<script>": set(),
    "1;": set(),
}
"""By text of a link: the fields that may hold it, a path."""


def test_a_hostile_url_is_reported_and_replaced(subtests: pytest.Subtests) -> None:
    for text, field in itertools.product(
        HOSTILE, [name for name in SETTINGS if name != "resume_from"]
    ):
        with subtests.test(f"{field}={text[:10]}"):
            config, found = RunConfig.from_params({field: text, "unknown": "x"})
            assert bool(found) is (field not in HOSTILE[text])
            if found:
                assert [problem.field for problem in found] == [field]
                assert config == RunConfig()
                assert len(str(found[0])) < 300
            else:
                assert RunConfig.from_params(config.to_params()) == (config, [])


def test_checkpoints_are_listed_as_resume_takes_them(tmp_path: Path) -> None:
    for name in ("run-a/best.pt", "run-a/other.pt", "run-b/step-12.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(checkpoints(tmp_path)) == ["run-a/best.pt", "run-b/step-12.pt"]
    for name in checkpoints(tmp_path):
        assert replace(RunConfig(), resume_from=name).resume_from == name
    assert checkpoints(tmp_path / "missing") == []
