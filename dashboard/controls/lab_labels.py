"""Labels of the lab: groups of settings, the baseline, durations; pure."""

from __future__ import annotations

from collections.abc import Mapping

from dashboard.controls.sidebar_groups import PLACES as SIDEBAR_PLACES
from dashboard.controls.sidebar_groups import differences
from dashboard.sweep_content import SweepContent
from stepscope.lab.plan import Variant
from trainer.config import GROUPS, SETTINGS, RunConfig
from trainer.lab.presets import PLAIN

LAB_GROUPS = ("Precision", *GROUPS, "Device and size")
PLACES = {
    **SIDEBAR_PLACES,
    "precision": "Precision",
    **dict.fromkeys(("device", "batch_size", "num_threads"), "Device and size"),
}
ALL_OFF = "all settings off (set_to_none is the zero_grad() default)"
DEVICE_HELP = (
    "Runs on this device instead. The batch size stays the same, so a small one leaves a large GPU "
    "idle."
)


def group_of(variant: Variant) -> str:
    return PLACES[next(iter(variant.changes), "device")]


def variant_label(variant: Variant, devices: Mapping[str, str]) -> str:
    """Return the label of a variant, such as "bf16 AMP"; `devices`: names by id."""
    match variant.changes:
        case {"precision": value} if len(variant.changes) == 1:
            return SETTINGS["precision"].choices[value]
        case {"device": value}:
            return devices.get(value, str(value))
    return variant.label


def variant_help(variant: Variant) -> str:
    """Return the help of a variant's setting, and its other changes."""
    field = next(iter(variant.changes), "device")
    text = variant.label
    if field in SETTINGS:
        text = DEVICE_HELP if field == "device" else SETTINGS[field].help
    others = [f"{name} = {value}" for name, value in variant.changes.items() if name != field]
    return f"{text} Also sets {', '.join(others)}." if others else text


def baseline_words(config: RunConfig) -> str:
    """Return the baseline in one line: workload, device and the settings that are on."""
    words = [
        SETTINGS["workload"].choices[config.workload],
        "CPU" if config.device == "cpu" else "GPU",
        SETTINGS["precision"].choices[config.precision],
        SETTINGS["optimizer"].choices[config.optimizer],
        f"batch {config.batch_size}",
    ]
    plain = {name: value for name, value in PLAIN.items() if name != "precision"}
    used = differences(config, plain)
    return " · ".join([*words, *(used or [ALL_OFF])])


def workload_and_device(sweep: SweepContent) -> str:
    """Return the title of a sweep; its workload may be of a later version."""
    config = sweep.plan.config
    on_cpu = config.get("device") == "cpu" if config else not sweep.machine.get("gpu")
    device = "CPU" if on_cpu else "GPU"
    name = SETTINGS["workload"].choices.get(sweep.workload, sweep.workload)
    return f"{name} on {device}"
