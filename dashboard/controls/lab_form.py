"""The lab's form: the sidebar's settings as the baseline, and the variants to compare with it.

Widgets keep their values for the session, and the address has them, so that a reload restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.controls.sidebar import NewRunForm, device_name, problems_of
from dashboard.controls.sidebar_groups import PLACES as SIDEBAR_PLACES
from dashboard.controls.sidebar_groups import differences
from dashboard.format import escape_markdown, named_reason, note
from dashboard.sweep_content import SweepContent
from stepscope.common.config_issue import ConfigIssue
from stepscope.common.formatting import format_duration
from stepscope.lab.plan import MAX_ROUNDS, Variant, estimate
from trainer.config import GROUPS, SETTINGS, RunConfig
from trainer.lab.plan import WorkloadPlan, all_variants, speed_problem
from trainer.lab.presets import PLAIN, PRESETS
from trainer.training.config_validation import TrainDevice

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


_PRESET_CHANGED = "lab_preset_changed"


@dataclass(frozen=True, slots=True)
class LabForm:
    """The plan, why it cannot start (or None), and the container of the button."""

    plan: WorkloadPlan
    refused: str | None
    place: DeltaGenerator


def lab_form(form: NewRunForm, devices: Sequence[TrainDevice]) -> LabForm:
    """Draw the form and return the selection; the baseline is the sidebar's or the preset's."""
    base = replace(form.config, resume_from="", max_steps=0)
    st.markdown("#### Settings to compare")
    preset = st.pills(
        "Preset",
        list(PRESETS),
        key="lab_preset",
        format_func=lambda name: PRESETS[name].label,
        # Checkboxes are set in the script: a callback has the settings of the run before.
        on_change=lambda: st.session_state.update({_PRESET_CHANGED: True}),
        help="Selects a set of settings and its baseline. You can change the selection; press "
        "again to return to the baseline of the sidebar.",
        bind="query-params",
        persist_state="session",
    )
    about = ""
    of_preset: list[Variant] = []
    if preset is not None:
        about = f"{PRESETS[preset].help} "
        base, of_preset = PRESETS[preset].build(base, devices)
    st.caption(f"{about}**Baseline:** {escape_markdown(baseline_words(base))}.")
    rounds, steps, find_best = _length_fields()
    # Filled below, at a fixed height, so that the checkboxes keep their positions.
    place = st.container(gap="xsmall", key="lab_begin")
    names = {device.id: device_name(device) for device in devices}
    variants = {variant.name: variant for variant in (*all_variants(base, devices), *of_preset)}
    if st.session_state.pop(_PRESET_CHANGED, False):
        selected = {variant.name for variant in of_preset}
        for name in variants:
            st.session_state[_checkbox_key(name)] = name in selected
    chosen: list[Variant] = []
    possible = [variant for variant in variants.values() if variant.problem is None]
    for group in LAB_GROUPS:
        members = [variant for variant in possible if group_of(variant) == group]
        if members:
            with st.container(gap="xxsmall"):
                st.markdown(f"**{group}**")
                chosen += _variant_checkboxes(members, names)
    _impossible_variants(variants.values(), names)
    plan = WorkloadPlan(
        config=base, variants=tuple(chosen), max_rounds=rounds, steps=steps, find_best=find_best
    )
    refused = _refusal(plan, dict.fromkeys((*form.problems, *problems_of(base, devices))))
    if refused is None and not chosen:
        impossible = [str(variant.problem) for variant in of_preset if variant.problem is not None]
        refused = next(iter(impossible), "Select at least one setting or a preset.")
    if refused is None:
        place.markdown(_duration_text(plan))
    return LabForm(plan, refused, place)


def _length_fields() -> tuple[int, int, bool]:
    """Draw the fields of the duration; return rounds, steps (0: automatic), and the search."""
    with st.expander("Duration"):
        # Not by session_state: drawn later, a widget may answer with the default of its kind.
        rounds = st.number_input(
            "Max rounds",
            min_value=2,
            max_value=MAX_ROUNDS,
            value=12,
            key="lab_rounds",
            help="A round measures every undecided setting once and the baseline once or more, in "
            "random order. Verdicts follow after 5, 8 and 12 rounds.",
            persist_state="session",
        )
        steps = st.number_input(
            "Steps per trial",
            min_value=0,
            max_value=100_000,
            value=0,
            key="lab_steps",
            help="Measured steps per trial, after warm-up; 0 uses as many as the baseline runs in "
            "two seconds.",
            persist_state="session",
        )
        find_best = st.toggle(
            "Find the best combination",
            value=True,
            key="lab_find_best",
            help="Combines the faster settings and measures the result against the baseline.",
            persist_state="session",
        )
    return int(rounds), int(steps), bool(find_best)


def _checkbox_key(name: str) -> str:
    return f"lab_variant_{name}"


def _variant_checkboxes(members: Sequence[Variant], devices: Mapping[str, str]) -> list[Variant]:
    """Draw a checkbox for each variant; return the checked ones."""
    columns = st.columns(2, gap="xsmall")
    return [
        variant
        for index, variant in enumerate(members)
        if columns[index % 2].checkbox(
            variant_label(variant, devices),
            key=_checkbox_key(variant.name),
            help=variant_help(variant),
            bind="query-params",
            persist_state="session",
        )
    ]


def _impossible_variants(variants: Iterable[Variant], devices: Mapping[str, str]) -> None:
    """Draw the variants that this machine or the baseline does not support, folded."""
    labels: dict[ConfigIssue, list[str]] = {}
    for variant in variants:
        if variant.problem is not None:
            labels.setdefault(variant.problem, []).append(variant_label(variant, devices))
    if labels:
        with st.expander("Not possible with this baseline", key="lab_impossible"):
            for problem, names in labels.items():
                reason = named_reason(", ".join(names), problem.reason)
                note("block", escape_markdown(f"{reason}. {problem.remedy}."))


def _refusal(plan: WorkloadPlan, problems: Iterable[ConfigIssue]) -> str | None:
    untimed = speed_problem(plan.config.device)
    if untimed is not None:
        return f"The baseline is not measured. {untimed}"
    reasons = " ".join(map(str, problems))
    return f"The baseline cannot run. {reasons}" if reasons else None


def _duration_text(plan: WorkloadPlan) -> str:
    shortest, longest = map(format_duration, estimate(plan))
    count = len(plan.variants)
    text = (
        f"Takes **{shortest} to {longest}**: {count} "
        f"setting{'s' if count > 1 else ''} plus the baseline, up to {plan.max_rounds} rounds."
    )
    if plan.max_rounds < min(plan.looks):
        text += f" Fewer than {min(plan.looks)} rounds give no verdict."
    return text
