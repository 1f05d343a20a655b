"""What loading and copying refuses, each with a reason and a remedy that works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer import config_validation as rules
from trainer.config import RunConfig, Workload
from trainer.config_validation import loading_problems
from trainer.techniques import SWITCHES
from trainer.workload_traits import TRAITS, WorkloadTraits

PINNED = {"pin_memory": True, "non_blocking": True}


def refused(on_gpu: bool, **changes: Any) -> list[str]:
    """The fields that are refused; every problem has its three parts."""
    config = replace(RunConfig(workload=Workload.DIGITS_MLP), **changes)
    found = loading_problems(config, on_gpu=on_gpu)
    assert all(problem.reason and problem.remedy for problem in found)
    return [problem.field for problem in found]


@pytest.mark.parametrize(
    "field", ["pin_memory", "non_blocking", "copy_stream", "dataset_on_device"]
)
def test_what_serves_copies_is_for_gpus(field: str) -> None:
    assert refused(False, **{field: True}) == [field]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        (PINNED, []),
        ({"non_blocking": True}, ["non_blocking"]),
        ({"copy_stream": True}, ["copy_stream"]),
        ({"copy_stream": True, "pin_memory": True}, []),
        ({"dataset_on_device": True}, []),
        ({"dataset_on_device": True, **PINNED}, []),
        ({"dataset_on_device": True, "copy_stream": True, **PINNED}, ["copy_stream"]),
        ({"dataset_on_device": True, "num_workers": 2}, ["dataset_on_device"]),
    ],
)
def test_on_a_gpu(changes: dict[str, Any], fields: list[str]) -> None:
    assert refused(True, **changes) == fields


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("changes", [{"prefetch_factor": 4}, {"persistent_workers": False}])
def test_settings_of_workers_need_workers(changes: dict[str, Any], on_gpu: bool) -> None:
    assert refused(on_gpu, **changes) == list(changes)
    assert refused(on_gpu, num_workers=1, **changes) == []


def test_data_that_are_decoded_can_be_kept_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = {**TRAITS, Workload.DIGITS_MLP: WorkloadTraits(decodes=True)}
    monkeypatch.setattr(rules, "TRAITS", traits)
    assert refused(True, dataset_on_device=True) == ["dataset_on_device"]
    assert refused(True, num_workers=2) == []
    assert refused(False, dataset_on_device=True) == []
    assert refused(False, dataset_on_device=True, num_workers=2) == ["dataset_on_device"]


def test_what_has_no_effect_beside_data_on_the_device_says_so_in_its_help() -> None:
    """It is no problem: pin_memory is on by default on a GPU."""
    helps = {switch.field: switch.help for switch in SWITCHES}
    for field in ("pin_memory", "non_blocking"):
        assert "dataset on the device" in helps[field]
        assert field in helps["dataset_on_device"]
