"""Labels of the lab: groups of settings, the baseline, durations; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dashboard.controls import sidebar_groups
from dashboard.sweep_content import SweepContent
from stepscope.lab.plan import Variant
from trainer.config import GROUPS, SETTINGS, RunConfig
from trainer.lab.presets import PLAIN

BASELINES = {"plain": "All off", "sidebar": "Sidebar settings"}
LAB_GROUPS = ("Precision", *GROUPS, "Device and size", "Workload options")
PLACES = {
    **sidebar_groups.PLACES,
    "precision": "Precision",
    **dict.fromkeys(("device", "batch_size", "num_threads"), "Device and size"),
}
ALL_OFF = "all techniques off (set_to_none is the zero_grad() default)"
DEVICE_HELP = (
    "Runs on this device instead. The batch size stays the same, so a small one leaves a large GPU "
    "idle."
)


def group_of(variant: Variant) -> str:
    return PLACES.get(next(iter(variant.changes), "device"), "Workload options")


def variant_label(variant: Variant, devices: Mapping[str, str]) -> str:
    """Return a variant's short label, such as "bf16 AMP" or "set_to_none off"."""
    if not variant.changes:
        return variant.label
    field, value = next(iter(variant.changes.items()))
    texts = {
        "custom_options": variant.name.replace("=false", " off"),
        "compile_mode": f"compile {value}",
        "optimizer_impl": f"{value} optimizer",
        "precision": SETTINGS["precision"].choices.get(value, str(value)),
        "device": devices.get(value, str(value)),
    }
    if field in texts:
        return texts[field]
    if len(variant.changes) > 1 and "+" in variant.name:
        return variant.label
    return _setting(field, value)


def _setting(field: str, value: Any) -> str:
    label = SETTINGS[field].label if field in SETTINGS else field.replace("_", " ")
    if isinstance(value, bool):
        return label if value else f"{label} off"
    return f"{label} {value}"


def variant_help(variant: Variant, own_settings: Mapping[str, str]) -> str:
    """Return the help of a variant's technique or custom option, and its other changes."""
    field = next(iter(variant.changes), "device")
    if field == "custom_options":
        return own_settings.get(variant.name.removesuffix("=false"), variant.label)
    text = variant.label
    if field in SETTINGS:
        text = DEVICE_HELP if field == "device" else SETTINGS[field].help
    others = [f"{name} = {value}" for name, value in variant.changes.items() if name != field]
    return f"{text} Also sets {', '.join(others)}." if others else text


def baseline_words(config: RunConfig) -> str:
    """Return the baseline in one line: workload, device and the techniques that are on."""
    values = {name: getattr(config, name) for name in PLAIN if name != "precision"}
    used = [_setting(name, value) for name, value in values.items() if value != PLAIN[name]]
    device = "CPU" if config.device == "cpu" else "GPU"
    kinds = [SETTINGS[name].choices[getattr(config, name)] for name in ("precision", "optimizer")]
    batch = f"batch {config.batch_size}"
    workload = SETTINGS["workload"].choices[config.workload]
    return " · ".join([workload, device, *kinds, batch, *(used or [ALL_OFF])])


def workload_and_device(sweep: SweepContent) -> str:
    """Return the title of a sweep; its workload may be of a later version."""
    names = {str(workload): name for workload, name in SETTINGS["workload"].choices.items()}
    config = sweep.plan.config
    on_cpu = config.get("device") == "cpu" if config else not sweep.machine.get("gpu")
    device = "CPU" if on_cpu else "GPU"
    return f"{names.get(sweep.workload, sweep.workload)} on {device}"


def throttle_words(sweep: SweepContent) -> str | None:
    """Return the reasons of throttling with their numbers of rounds; None without any."""
    found = Counter(
        reason
        for one in sweep.rounds
        for reason in {trial.throttle for trial in one.samples.values() if trial.throttle}
    )
    if not found:
        return None
    of = f"{len(sweep.rounds)} round{'s' if len(sweep.rounds) > 1 else ''}"
    parts = [f"{reason} in {count} of {of}" for reason, count in sorted(found.items())]
    return f"The device was throttled: {'; '.join(parts)}."
