"""The lab's form for a built-in workload: its baseline, and the variants to compare with it.

Widgets keep their values for the session, and the address has them, so that a reload restores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.controls.config_widgets import absent, offered
from dashboard.controls.lab_labels import (
    BASELINES,
    LAB_GROUPS,
    baseline_words,
    group_of,
    variant_help,
    variant_label,
)
from dashboard.controls.sidebar import SETTINGS as SIDEBAR
from dashboard.controls.sidebar import device_name
from dashboard.format import escape_markdown, named_reason, note
from dashboard.services import Devices
from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.common.formatting import format_duration
from stepscope.lab.plan import MAX_ROUNDS, SweepPlan, Variant, estimate
from trainer.config import SETTINGS, RunConfig, Workload, defaults
from trainer.config_validation import TrainDevice, validate
from trainer.lab.plan import LAB_SETTINGS, WorkloadPlan, all_variants, speed_problem
from trainer.lab.presets import PLAIN, PRESETS

_KEPT_FIELDS = ("seed", "num_threads", *(name for name in LAB_SETTINGS if name != "channels_last"))
"""Settings that another workload keeps; channels_last has a default for each."""
_SIDEBARS = "lab_sidebars_workload"
_PRESET_CHANGED = "lab_preset_changed"


@dataclass(frozen=True, slots=True)
class LabForm:
    """The plan, why it cannot start (or None), the button's container, and a script's command."""

    plan: SweepPlan | None
    refused: str | None
    place: DeltaGenerator
    words: tuple[str, ...] = ()


def workload_form(found: Devices, settings: RunConfig) -> LabForm:
    """Draw the form and return the selection; `settings` are the sidebar's."""
    st.markdown("#### Settings to compare")
    base = _baseline_fields(found.devices, settings)
    preset = st.pills(
        "Preset",
        list(PRESETS),
        key="lab_preset",
        format_func=lambda name: PRESETS[name].label,
        # Checkboxes are set in the script: a callback has the settings of the run before.
        on_change=lambda: st.session_state.update({_PRESET_CHANGED: True}),
        help="Selects a set of settings and its baseline. You can change the selection; press "
        "again to return to your own baseline.",
        bind="query-params",
        persist_state="session",
    )
    about = ""
    of_preset: list[Variant] = []
    if preset is not None:
        about = f"{PRESETS[preset].help} "
        base, of_preset = PRESETS[preset].build(base, found.devices)
    st.caption(f"{about}**Baseline:** {escape_markdown(baseline_words(base))}.")
    rounds, steps, find_best = length_fields()
    # Filled below, at a fixed height, so that the checkboxes keep their positions.
    place = st.container(gap="xsmall", key="lab_begin")
    variants = {
        variant.name: variant for variant in (*all_variants(base, found.devices), *of_preset)
    }
    if st.session_state.pop(_PRESET_CHANGED, False):
        selected = {variant.name for variant in of_preset}
        for name in variants:
            st.session_state[_checkbox_key(name)] = name in selected
    chosen: list[Variant] = []
    for group in LAB_GROUPS:
        members = [variant for variant in variants.values() if group_of(variant) == group]
        if members:
            with st.container(gap="xxsmall"):
                st.markdown(f"**{group}**")
                names = _device_names(found.devices)
                chosen += _variant_checkboxes(members, names)
    plan = WorkloadPlan(
        config=base, variants=tuple(chosen), max_rounds=rounds, steps=steps, find_best=find_best
    )
    refused = _refusal(plan, (*validate(base, found.devices), *absent(base)))
    if refused is None:
        place.markdown(_duration_text(plan))
    return LabForm(plan, refused, place)


def baseline(
    kind: str, settings: RunConfig, workload: Workload, device: str, devices: Sequence[TrainDevice]
) -> RunConfig:
    """Return the baseline: the sidebar's settings, or "plain", with all settings off.

    Unsupported settings are off. A workload that is not the sidebar's has its own sizes.
    """
    config = settings
    if workload is not settings.workload:
        kept = {name: getattr(settings, name) for name in _KEPT_FIELDS}
        config = replace(defaults(workload, device), **kept)
    config = replace(config, device=device, resume_from="", max_steps=0)
    if kind == "plain":
        return replace(config, **PLAIN)
    problems = validate(config, devices)
    off = {problem.field: PLAIN[problem.field] for problem in problems if problem.field in PLAIN}
    return replace(config, **off)


def _baseline_fields(devices: Sequence[TrainDevice], settings: RunConfig) -> RunConfig:
    names = _device_names(devices)
    state = st.session_state
    state.setdefault("lab_device", settings.device if settings.device in names else devices[0].id)
    if state.get(_SIDEBARS) != settings.workload:  # changed on the Run page
        if _SIDEBARS in state or "lab_workload" not in st.query_params:
            state["lab_workload"] = settings.workload
        state[_SIDEBARS] = settings.workload
    workload = st.selectbox(
        "Workload",
        offered(state.get("lab_workload", settings.workload)),
        key="lab_workload",
        format_func=SETTINGS["workload"].choices.__getitem__,
        help="What every trial trains. A setting may help one workload and hurt another.",
        bind="query-params",
        persist_state="session",
    )
    device = st.selectbox(
        "Device",
        list(names),
        key="lab_device",
        format_func=names.__getitem__,
        help="Where the baseline runs. Select other devices below.",
        persist_state="session",
    )
    kind = st.radio(
        "Baseline",
        list(BASELINES),
        key="lab_baseline",
        format_func=BASELINES.__getitem__,
        horizontal=True,
        help="Each setting is measured as a change to the baseline. “All off” disables every "
        "setting; “Sidebar settings” uses the sidebar of the Run page. Batch size, learning rate "
        "and sizes come from the sidebar in both, or are the recommended ones if the workload "
        "differs.",
        bind="query-params",
        persist_state="session",
    )
    return baseline(kind, settings, workload, device, devices)


def _device_names(devices: Sequence[TrainDevice]) -> dict[str, str]:
    return {device.id: device_name(device) for device in devices}


def length_fields() -> tuple[int, int, bool]:
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
    """Draw a checkbox for each variant, and why some are not supported; return the checked ones."""
    chosen: list[Variant] = []
    unsupported: dict[ConfigIssue, list[str]] = {}
    columns = st.columns(2, gap="xsmall")
    # Supported variants first: the reasons below are then next to the unsupported ones.
    for index, variant in enumerate(sorted(members, key=lambda one: one.problem is not None)):
        key, label = _checkbox_key(variant.name), variant_label(variant, devices)
        if variant.problem is not None:
            st.session_state[key] = False  # Streamlit keeps the value of a disabled checkbox
            unsupported.setdefault(variant.problem, []).append(label)
        checked = columns[index % 2].checkbox(
            label,
            key=key,
            help=variant_help(variant),
            disabled=variant.problem is not None,
            bind="query-params",
            persist_state="session",
        )
        if checked:
            chosen.append(variant)
    for problem, labels in unsupported.items():
        text = f"{named_reason(', '.join(labels), problem.reason)}. {problem.remedy}."
        note("block", escape_markdown(text))
    return chosen


def _refusal(plan: WorkloadPlan, problems: Sequence[ConfigIssue]) -> str | None:
    untimed = speed_problem(plan.config.device)
    if untimed is not None:
        return f"The baseline is not measured. {untimed}"
    if problems:
        return "The baseline cannot run. " + " ".join(map(str, problems))
    return None if plan.variants else "Select at least one setting or a preset."


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


def settings_of_sidebar() -> RunConfig:
    """Return the sidebar's settings, which the Run page or a link has set."""
    settings = st.session_state[SIDEBAR]
    try:
        return RunConfig(**settings)
    except ConfigError:
        return defaults(settings["workload"], settings["device"])
