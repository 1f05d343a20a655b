"""What a sweep is to measure: the baseline, the settings to tick, and for how many rounds.

The widgets keep their values for the session, also while other pages are shown; after a reload the
ticks and what they depend on come back from the address (`lab_url.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.controls import lab_url
from dashboard.controls.lab_labels import BASELINES, GROUPS, arm_help, arm_words, group_of, seconds
from dashboard.controls.lab_labels import baseline_words as words
from dashboard.controls.sidebar import SETTINGS, WORKLOADS
from dashboard.controls.workload_fields import absent, offered
from dashboard.format import escape_markdown, named_reason
from dashboard.services import Devices, Services
from trainer.config import ConfigError, ConfigIssue, RunConfig, Workload, defaults
from trainer.config_validation import TrainDevice, validate
from trainer.lab.folder import seconds_per_sample
from trainer.lab.plan import MAX_ROUNDS, SweepPlan, estimate
from trainer.lab.presets import PLAIN, PRESETS
from trainer.lab.variants import Variant, all_variants, own_settings
from trainer.techniques import SWITCHES

_TAKEN = "lab_preset_taken"
_SIDEBARS = "lab_sidebars_workload"
_KEPT: Any = {"persist_state": "session"}
_KEPT_FIELDS = ("seed", "num_threads", *(s.field for s in SWITCHES if s.field != "channels_last"))
"""Settings that another workload leaves as they are; channels_last has a default for each."""


@dataclass(frozen=True, slots=True)
class LabForm:
    """The plan as it is chosen now, why it cannot start or None, and where to draw the button."""

    plan: SweepPlan
    refused: str | None
    place: DeltaGenerator


def wanted(server: Services, found: Devices, settings: RunConfig) -> LabForm:
    """Draw the choice and return it; `settings` are the sidebar's."""
    st.markdown("#### Settings to compare")
    boxes: dict[str, Collection[str]] = {
        "on": WORKLOADS.keys(),
        "baseline": BASELINES.keys(),
        "preset": PRESETS.keys(),
    }
    if lab_url.take_boxes(boxes):
        st.session_state[_SIDEBARS] = settings.workload
    base = _baseline(found.devices, settings)
    preset = _preset()
    preset_arms: list[Variant] = []
    if preset is not None:
        base, preset_arms = PRESETS[preset].build(base, found.devices)
    about = f"{PRESETS[preset].help} " if preset is not None else ""
    st.caption(f"{about}**Baseline:** {escape_markdown(words(base))}.")
    rounds, steps, find_best = _length()
    # Filled when the ticks below are known; its height is kept, so that they stay where they are.
    place = st.container(gap="xsmall", key="lab_begin")
    of_preset = {arm.name for arm in preset_arms}
    offers = {arm.name: arm for arm in (*all_variants(base, found.devices), *preset_arms)}
    if st.session_state.pop(_TAKEN, False):
        for name in offers:
            st.session_state[_box(name)] = name in of_preset
    for name in lab_url.ticks_of_link():
        if name in offers:
            st.session_state[_box(name)] = True
    chosen = _ticks(list(offers.values()), of_preset, found.devices, own_settings(base))
    lab_url.keep(arm.name for arm in chosen)
    plan = SweepPlan(
        config=base, arms=tuple(chosen), max_rounds=rounds, steps=steps, find_best=find_best
    )
    refused = _refused(plan, (*validate(base, found.devices), *absent(base)))
    if refused is None:
        place.markdown(_time_words(server, plan))
    return LabForm(plan, refused, place)


def baseline(
    kind: str, settings: RunConfig, workload: Workload, device: str, devices: Sequence[TrainDevice]
) -> RunConfig:
    """Return the settings to compare with: the sidebar's, or "plain", with every technique off.

    A workload that is not the sidebar's brings its own sizes; what it or the device cannot do is
    switched off.
    """
    config = settings
    if workload is not settings.workload:
        kept = {name: getattr(settings, name) for name in _KEPT_FIELDS}
        config = replace(defaults(workload, device), **kept)
    config = replace(config, device=device, resume_from="", max_steps=0)
    if kind == "plain":
        return replace(config, **PLAIN)
    off = {p.field: PLAIN[p.field] for p in validate(config, devices) if p.field in PLAIN}
    return replace(config, **off)


def _baseline(devices: Sequence[TrainDevice], settings: RunConfig) -> RunConfig:
    names = {device.id: _device_name(device) for device in devices}
    first = settings.device if settings.device in names else devices[0].id
    state = st.session_state
    if state.get(_SIDEBARS) != settings.workload:  # chosen there after the last look
        state[_SIDEBARS] = state["lab_workload"] = settings.workload
    workload = st.selectbox(
        "Workload",
        offered(state["lab_workload"]),
        format_func=WORKLOADS.__getitem__,
        key="lab_workload",
        help="What every trial trains. A technique may help one workload and hurt another.",
        **_KEPT,
    )
    device = st.selectbox(
        "Device",
        list(names),
        format_func=names.__getitem__,
        key=_first("lab_device", first),
        help="Where the baseline runs. Select other devices below.",
        **_KEPT,
    )
    kind = st.radio(
        "Baseline",
        list(BASELINES),
        format_func=BASELINES.__getitem__,
        key=_first("lab_baseline", "plain"),
        horizontal=True,
        help="Each setting is measured as a change to the baseline. “All off” disables every "
        "technique; “Sidebar settings” uses the sidebar of the Run page. Batch size, "
        "learning rate and sizes come from the sidebar in both, or are the recommended "
        "ones if the workload differs.",
        **_KEPT,
    )
    return baseline(kind, settings, workload, device, devices)


def _device_name(device: TrainDevice) -> str:
    return "CPU" if device.cuda_index is None else f"cuda:{device.cuda_index} · {device.name}"


def _preset() -> str | None:
    preset: str | None = st.pills(
        "Preset",
        list(PRESETS),
        format_func=lambda name: PRESETS[name].label,
        key="lab_preset",
        on_change=_preset_taken,
        help="Selects a set of settings and its baseline. You can change the selection; press "
        "again to return to your own baseline.",
        **_KEPT,
    )
    return preset


def _preset_taken() -> None:
    # Ticked in the script: here the settings are those of the last time the page was drawn.
    st.session_state[_TAKEN] = True


def _length() -> tuple[int, int, bool]:
    with st.expander("Duration"):
        rounds = st.number_input(
            "Max rounds",
            2,
            MAX_ROUNDS,
            key=_first("lab_rounds", 12),
            help="A round measures every setting once and the baseline once or more, in random "
            "order. After 5, 8 and 12 rounds the lab judges, and what is decided is measured no "
            "more.",
            **_KEPT,
        )
        steps = st.number_input(
            "Steps per trial",
            0,
            100_000,
            key=_first("lab_steps", 0),
            help="Measured steps per trial, after warm-up; 0 uses as many as the baseline runs "
            "in two seconds.",
            **_KEPT,
        )
        find_best = st.toggle(
            "Find the best combination",
            key=_first("lab_find_best", True),
            help="Combines the winners one by one and measures the result against the baseline "
            "again.",
            **_KEPT,
        )
    return int(rounds), int(steps), bool(find_best)


def _first(key: str, value: Any) -> str:
    """Give a widget the value that it has at first, and return its key."""
    st.session_state.setdefault(key, value)
    return key


def _box(name: str) -> str:
    return f"lab_arm_{name}"


def _ticks(
    offered: list[Variant],
    of_preset: set[str],
    devices: Sequence[TrainDevice],
    own: Mapping[str, str],
) -> list[Variant]:
    """Draw a box for each arm, in the sidebar's groups; return the arms to measure.

    One of a preset that cannot be is a row of the sweep too, with its reason.
    """
    chosen = []
    for group in GROUPS:
        members = [arm for arm in offered if group_of(arm) == group]
        if members:
            with st.container(gap="xxsmall"):
                st.markdown(f"**{group}**")
                chosen += _group(members, of_preset, devices, own)
    return chosen


def _group(
    members: list[Variant],
    of_preset: set[str],
    devices: Sequence[TrainDevice],
    own: Mapping[str, str],
) -> list[Variant]:
    chosen = []
    refused: dict[tuple[ConfigIssue, bool], list[str]] = {}
    names = {device.id: _device_name(device) for device in devices}
    # What can be measured stands first: a reason below is then about the last ones.
    members = sorted(members, key=lambda arm: arm.problem is not None)
    for row in (members[at : at + 2] for at in range(0, len(members), 2)):
        for column, arm in zip(st.columns(2, gap="xsmall"), row, strict=False):
            key, label = _box(arm.name), arm_words(arm, names)
            # One that cannot be is on by a preset only, and can then be taken out of the sweep.
            ticked = arm.name in of_preset and st.session_state.get(key, False)
            off = arm.problem is not None and not ticked
            if off:
                st.session_state[key] = False  # Streamlit keeps the value of a disabled box
            if arm.problem is not None:
                refused.setdefault((arm.problem, off), []).append(label)
            if column.checkbox(label, key=key, help=arm_help(arm, own), disabled=off, **_KEPT):
                chosen.append(arm)
    for (problem, off), labels in refused.items():
        # What is not ticked need not be taken back.
        remedy = "" if off else f" {problem.remedy}."
        text = f"{named_reason(', '.join(labels), problem.reason)}.{remedy}"
        st.caption(f":material/block: {escape_markdown(text)}")
    return chosen


def _refused(plan: SweepPlan, found: Sequence[ConfigIssue]) -> str | None:
    if found:
        return "The baseline cannot run. " + " ".join(map(str, found))
    if not plan.arms:
        return "Select at least one setting or a preset."
    problem = plan.arms[0].problem
    if problem is not None and all(arm.problem is not None for arm in plan.arms):
        return f"None of these settings can be measured on this machine. {problem}"
    return None


def _time_words(server: Services, plan: SweepPlan) -> str:
    measured = seconds_per_sample(server.runs, str(plan.config.workload), plan.config.device)
    takes = estimate(plan, measured)
    here = sum(arm.problem is None for arm in plan.arms)
    listed = len(plan.arms) - here
    few = min(plan.looks)
    early = "" if plan.max_rounds >= few else f" Fewer than {few} rounds give no verdict."
    more = f" {listed} are not supported here and are listed with the reason." if listed else ""
    return (
        f"Takes **{seconds(takes.low, takes.high)}**: {here} setting{'s' if here > 1 else ''} "
        f"plus the baseline, up to {plan.max_rounds} "
        f"round{'s' if plan.max_rounds > 1 else ''}.{early}{more}"
    )


def settings_of_sidebar() -> RunConfig:
    """Return the sidebar's settings, which the page Live has drawn or a link has set."""
    settings = st.session_state[SETTINGS]
    try:
        return RunConfig(**settings)
    except ConfigError:
        return defaults(settings["workload"], settings["device"])
