"""The plans of the command line and the page: variants, presets, estimates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.common.config_issue import ConfigError
from stepscope.lab.command import UsageError
from stepscope.lab.folder import SweepError, sweep_folder
from trainer.config import SETTINGS, Workload, defaults
from trainer.lab.options import parser, plan_of
from trainer.lab.plan import (
    FIXED,
    LAB_SETTINGS,
    NOT_TIMED,
    WorkloadPlan,
    all_variants,
    changed,
    make_variant,
)
from trainer.lab.presets import PRESETS
from trainer.training.config_validation import TrainDevice, validate

CPU = TrainDevice(id="cpu", name="a CPU", memory_total=2**33)
GPU = TrainDevice(
    id="GPU-1", name="a GPU", memory_total=2**34, cuda_index=0, compute_capability=(9, 0)
)


def planned(*words: str, devices: tuple[TrainDevice, ...] = (CPU,)) -> WorkloadPlan:
    return plan_of(parser().parse_args(["--workload", "digits_cnn", *words]), devices)


@pytest.mark.parametrize("device", ["cpu", "GPU-1"])
def test_every_setting_has_a_variant_and_each_supported_one_can_run(device: str) -> None:
    config = defaults(Workload.DIGITS_CNN, device)
    variants = all_variants(config, [CPU, GPU])
    missing = {*LAB_SETTINGS} - {f for one in variants for f in one.changes}
    # The last two have no effect without workers.
    assert missing <= NOT_TIMED | {"prefetch_factor", "persistent_workers"}
    assert len({one.name for one in variants}) == len(variants)
    for variant in variants:
        if variant.problem is None:
            assert validate(changed(config, variant.changes), [CPU, GPU]) == (), variant.name
            assert changed(config, variant.changes) != config


def test_a_variant_includes_its_requirements() -> None:
    pinned = defaults(Workload.DIGITS_CNN, "GPU-1")
    config = replace(pinned, pin_memory=False, non_blocking=False)
    for base, change, more in (
        (config, {"non_blocking": True}, {"pin_memory": True}),
        (pinned, {"pin_memory": False}, {"non_blocking": False}),
        (config, {"gradient_accumulation_steps": 4}, {"batch_size": 32}),  # as many samples
    ):
        assert make_variant(change, base, [GPU]).changes == change | more


def test_a_choice_without_a_value_means_all_values_and_unsupported_ones_stay() -> None:
    plan = planned("--variants", "precision")
    unsupported = {variant.name for variant in plan.variants if variant.problem is not None}
    assert {variant.name for variant in plan.variants} >= {"precision=bf16", "precision=tf32"}
    assert unsupported == {"precision=tf32", "precision=pure_fp16"}


def test_options_of_the_baseline() -> None:
    plan = planned(
        *("--variants", "num_workers=2", "--precision", "bf16", "--batch-size", "64"),
        *("--set", "learning_rate=0.01", "--set", "channels_last=false"),
        *("--steps", "50", "--warmup", "5", "--max-rounds", "8", "--no-combination"),
    )
    config = plan.config
    assert (config.precision, config.batch_size, config.learning_rate) == ("bf16", 64, 0.01)
    assert not config.channels_last
    assert (plan.steps, plan.warmup, plan.max_rounds, plan.find_best) == (50, 5, 8, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variants", "pin_memry"], "Did you mean pin_memory"),
        (["--variants", "epochs=3"], "epochs must be the same"),
        (["--variants", "precision=fp32"], "precision=fp32 equals the baseline. Remove it"),
        (["--variants", "num_workers+pin_memory"], "has no value"),
        (["--variants", "width"], "no value to suggest"),
        (["--variants", "channels_last", "--preset", "loading"], "Remove --variants or --preset"),
        (["--variants", "num_workers=2+num_workers=4"], "has num_workers twice. Remove one"),
        (["--set", "batch_size"], "must be FIELD=VALUE"),
        (["--device", "cuda"], "no usable GPU"),
        (["--precision", "tf32"], "tf32 needs a GPU"),
    ],
)
def test_wrong_words_are_refused_with_what_to_do(words: list[str], said: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=said):
        planned(*words)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("devices", [(CPU,), (GPU, CPU)])
def test_presets_make_a_plan(name: str, devices: tuple[TrainDevice, ...]) -> None:
    plan = planned("--preset", name, devices=devices)
    assert plan.variants
    assert validate(plan.config, devices) == ()
    for variant in plan.variants:
        # `runner` follows from `parallel`, and is no variant of its own.
        assert set(variant.changes) <= set(SETTINGS) - (FIXED - {"runner"})
    if name == "cpu_gpu":
        can = [variant.problem is None for variant in plan.variants]
        assert (plan.config.device, can) == ("cpu", [len(devices) == 2])


def test_the_page_can_plan_without_torch() -> None:
    """And the command handles signals before torch, which takes seconds to import."""
    code = "import sys, trainer.lab.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["../runs", "a/b", "", ".hidden", "nothing-here"])
def test_a_sweep_is_named_by_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SweepError):
        sweep_folder(tmp_path, name)
