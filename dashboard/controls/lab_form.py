"""The lab's forms: settings of a workload to compare, or the command of a script of the user.

Widgets keep their values for the session. The selection of settings is in the page's address, so
that a reload restores it; a script's fields are not: a link must not prepare a command.
"""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.controls.config_widgets import absent, offered
from dashboard.controls.lab_labels import (
    BASELINES,
    LAB_GROUPS,
    group_of,
    variant_help,
    variant_label,
)
from dashboard.controls.lab_labels import baseline_words as words
from dashboard.controls.sidebar import SETTINGS as SIDEBAR
from dashboard.format import escape_markdown, named_reason, note, pick, segments
from dashboard.services import Devices, Services
from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.common.files import read_regular_file
from stepscope.common.formatting import format_duration
from stepscope.host.environment import granted_cores
from stepscope.lab import script_plan
from stepscope.lab.command import UsageError
from stepscope.lab.folder import SweepError, seconds_per_sample
from stepscope.lab.plan import MAX_ROUNDS, SweepPlan, Variant, estimate
from stepscope.lab.statistics import load_scipy
from stepscope.run.rank_info import RANKS_LIMIT
from trainer.config import SETTINGS, RunConfig, Workload, defaults
from trainer.config_validation import TrainDevice, validate
from trainer.lab.plan import (
    LAB_SETTINGS,
    WorkloadPlan,
    all_variants,
    own_settings,
    speed_problem,
)
from trainer.lab.presets import PLAIN, PRESETS

TUNE, COMPARE = "Try all settings", "Compare variants"
MAX_SCRIPT_BYTES = 2**20
_EXAMPLES = "bs64: --batch-size 64\ntf32\nnum_workers=4 pin_memory\nenv:OMP_NUM_THREADS=1"
_PRESET_CHANGED = "lab_preset_taken"
_LINK_READ = "lab_link_taken"
_LINK_TICKS = "lab_link_ticks"
_SIDEBARS = "lab_sidebars_workload"
_KEPT: Any = {"persist_state": "session"}
_KEPT_FIELDS = ("seed", "num_threads", *(name for name in LAB_SETTINGS if name != "channels_last"))
"""Settings that another workload keeps; channels_last has a default for each."""
_PARAMS: dict[str, tuple[str, Collection[str]]] = {  # of the address: widget and values
    "on": ("lab_workload", SETTINGS["workload"].choices),
    "baseline": ("lab_baseline", BASELINES),
    "preset": ("lab_preset", PRESETS),
}
_TICKS = "ticks"
_BETWEEN = "~"  # Between two ticks: names of variants have commas, plus and equals signs.


@dataclass(frozen=True, slots=True)
class LabForm:
    """The plan, why it cannot start (or None), the button's container, and a script's command."""

    plan: SweepPlan | None
    refused: str | None
    place: DeltaGenerator
    words: tuple[str, ...] = ()


def wanted(server: Services, found: Devices, settings: RunConfig) -> LabForm:
    """Draw the form and return the selection; `settings` are the sidebar's."""
    st.markdown("#### Settings to compare")
    if _read_link():
        st.session_state[_SIDEBARS] = settings.workload
    base = _baseline(found.devices, settings)
    preset = _preset()
    preset_variants: list[Variant] = []
    if preset is not None:
        base, preset_variants = PRESETS[preset].build(base, found.devices)
    about = f"{PRESETS[preset].help} " if preset is not None else ""
    st.caption(f"{about}**Baseline:** {escape_markdown(words(base))}.")
    rounds, steps, find_best = length_fields()
    # Filled below, at a fixed height, so that the checkboxes keep their positions.
    place = st.container(gap="xsmall", key="lab_begin")
    of_preset = {variant.name for variant in preset_variants}
    offers = {
        variant.name: variant for variant in (*all_variants(base, found.devices), *preset_variants)
    }
    if st.session_state.pop(_PRESET_CHANGED, False):
        for name in offers:
            st.session_state[_box(name)] = name in of_preset
    for name in st.session_state.pop(_LINK_TICKS, []):
        if name in offers:
            st.session_state[_box(name)] = True
    chosen: list[Variant] = []
    for group in LAB_GROUPS:
        if members := [variant for variant in offers.values() if group_of(variant) == group]:
            with st.container(gap="xxsmall"):
                st.markdown(f"**{group}**")
                names = _device_names(found.devices)
                chosen += _group(members, of_preset, names, own_settings(base))
    _write_link(variant.name for variant in chosen)
    plan = WorkloadPlan(
        config=base, variants=tuple(chosen), max_rounds=rounds, steps=steps, find_best=find_best
    )
    refused = _refused(plan, (*validate(base, found.devices), *absent(base)))
    if refused is None:
        place.markdown(_time_words(server, plan))
    return LabForm(plan, refused, place)


def _read_link() -> bool:
    """Put valid values of the address into the widgets, once; return True if it has a workload."""
    state, params = st.session_state, st.query_params
    if state.get(_LINK_READ):
        return False
    state[_LINK_READ] = True
    given = {name: params[name] for name in _PARAMS if name in params}
    valid = {name: value for name, value in given.items() if value in _PARAMS[name][1]}
    for name, value in valid.items():
        state[_PARAMS[name][0]] = value
    state[_LINK_TICKS] = params.get(_TICKS, "").split(_BETWEEN)
    return "on" in valid


def _write_link(ticked: Iterable[str]) -> None:
    values = {name: str(st.session_state.get(key) or "") for name, (key, _) in _PARAMS.items()}
    for name, value in (values | {_TICKS: _BETWEEN.join(ticked)}).items():
        if not value:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != value:
            st.query_params[name] = value


def baseline(
    kind: str, settings: RunConfig, workload: Workload, device: str, devices: Sequence[TrainDevice]
) -> RunConfig:
    """Return the baseline: the sidebar's settings, or "plain", with all techniques off.

    Unsupported techniques are off. A workload that is not the sidebar's has its own sizes.
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
    names = _device_names(devices)
    state = st.session_state
    state.setdefault("lab_device", settings.device if settings.device in names else devices[0].id)
    if state.get(_SIDEBARS) != settings.workload:  # changed on the Run page
        state[_SIDEBARS] = state["lab_workload"] = settings.workload
    labels = SETTINGS["workload"].choices
    workloads = {one: labels[one] for one in offered(state["lab_workload"])}
    about = "What every trial trains. A technique may help one workload and hurt another."
    workload = pick("Workload", workloads, "lab_workload", about, **_KEPT)
    about = "Where the baseline runs. Select other devices below."
    device = pick("Device", names, "lab_device", about, **_KEPT)
    about = (
        "Each setting is measured as a change to the baseline. “All off” disables every technique; "
        "“Sidebar settings” uses the sidebar of the Run page. Batch size, learning rate and sizes "
        "come from the sidebar in both, or are the recommended ones if the workload differs."
    )
    label = BASELINES.__getitem__
    more = {"key": "lab_baseline", "horizontal": True, "help": about, **_KEPT}
    kind = st.radio("Baseline", list(BASELINES), format_func=label, **more)
    return baseline(kind, settings, workload, device, devices)


def _device_names(devices: Sequence[TrainDevice]) -> dict[str, str]:
    return {
        one.id: "CPU" if one.cuda_index is None else f"cuda:{one.cuda_index} · {one.name}"
        for one in devices
    }


def _preset() -> str | None:
    more: Any = {
        "format_func": lambda name: PRESETS[name].label,
        # Checkboxes are set in the script: a callback has the settings of the run before.
        "on_change": lambda: st.session_state.update({_PRESET_CHANGED: True}),
        "help": "Selects a set of settings and its baseline. You can change the selection; press "
        "again to return to your own baseline.",
    }
    preset: str | None = st.pills("Preset", list(PRESETS), key="lab_preset", **more, **_KEPT)
    return preset


def length_fields() -> tuple[int, int, bool]:
    """Draw the fields of the duration; return rounds, steps (0: automatic), and the search."""
    with st.expander("Duration"):
        about = (
            "A round measures every undecided setting once and the baseline once or more, in "
            "random order. Verdicts follow after 5, 8 and 12 rounds."
        )
        more: Any = {"help": about, **_KEPT}
        # Not by session_state: drawn again, a widget may answer with the default of its kind.
        rounds = st.number_input("Max rounds", 2, MAX_ROUNDS, 12, key="lab_rounds", **more)
        about = (
            "Measured steps per trial, after warm-up; 0 uses as many as the baseline runs in two "
            "seconds."
        )
        more["help"] = about
        steps = st.number_input("Steps per trial", 0, 100_000, 0, key="lab_steps", **more)
        more["help"] = (
            "Combines the winners one by one and measures the result against the baseline again."
        )
        find_best = st.toggle("Find the best combination", True, key="lab_find_best", **more)
    return int(rounds), int(steps), bool(find_best)


def _box(name: str) -> str:
    return f"lab_variant_{name}"


def _group(
    members: list[Variant], of_preset: set[str], devices: Mapping[str, str], own: Mapping[str, str]
) -> list[Variant]:
    chosen = []
    refused: dict[tuple[ConfigIssue, bool], list[str]] = {}
    # Supported variants first: the reasons below are then next to the unsupported ones.
    members = sorted(members, key=lambda variant: variant.problem is not None)
    for row in (members[at : at + 2] for at in range(0, len(members), 2)):
        for column, variant in zip(st.columns(2, gap="xsmall"), row, strict=False):
            key, label = _box(variant.name), variant_label(variant, devices)
            # Only a preset selects an unsupported variant, which can then be deselected.
            ticked = variant.name in of_preset and st.session_state.get(key, False)
            off = variant.problem is not None and not ticked
            if off:
                st.session_state[key] = False  # Streamlit keeps the value of a disabled checkbox
            if variant.problem is not None:
                refused.setdefault((variant.problem, off), []).append(label)
            if column.checkbox(
                label, key=key, help=variant_help(variant, own), disabled=off, **_KEPT
            ):
                chosen.append(variant)
    for (problem, off), labels in refused.items():
        remedy = "" if off else f" {problem.remedy}."
        text = f"{named_reason(', '.join(labels), problem.reason)}.{remedy}"
        note("block", escape_markdown(text))
    return chosen


def _refused(plan: WorkloadPlan, found: Sequence[ConfigIssue]) -> str | None:
    untimed = speed_problem(plan.config.device)
    if untimed is not None:
        return f"The baseline is not measured. {untimed}"
    if found:
        return "The baseline cannot run. " + " ".join(map(str, found))
    if not plan.variants:
        return "Select at least one setting or a preset."
    problem = plan.variants[0].problem
    if problem is not None and all(variant.problem is not None for variant in plan.variants):
        return f"None of these settings can be measured on this machine. {problem}"
    return None


def _time_words(server: Services, plan: WorkloadPlan) -> str:
    measured = seconds_per_sample(server.runs, str(plan.config.workload), plan.config.device)
    takes = estimate(plan, measured)
    here = sum(variant.problem is None for variant in plan.variants)
    listed = len(plan.variants) - here
    few = min(plan.looks)
    early = "" if plan.max_rounds >= few else f" Fewer than {few} rounds give no verdict."
    more = f" {listed} are not supported here and are listed with the reason." if listed else ""
    return (
        f"Takes **{format_duration(takes.low)} to {format_duration(takes.high)}**: {here} "
        f"setting{'s' if here > 1 else ''} plus the baseline, up to {plan.max_rounds} rounds."
        f"{early}{more}"
    )


def settings_of_sidebar() -> RunConfig:
    """Return the sidebar's settings, which the Run page or a link has set."""
    settings = st.session_state[SIDEBAR]
    try:
        return RunConfig(**settings)
    except ConfigError:
        return defaults(settings["workload"], settings["device"])


def wanted_script(simulated: bool) -> LabForm:
    """Draw the form of a script and return its plan and command; `simulated`: a GPU is."""
    about = "A training script, relative to the working folder, or -m and a module."
    target = _text("Script", "lab_script", "train.py or -m package.module", about)
    about = "{out} becomes a new folder of each trial, {seed} a number per round."
    arguments = _text("Arguments", "lab_arguments", "--epochs 90 --out {out}", about)
    about = "Trials run here, as in a terminal. No trial may change a file in it."
    folder = _text("Working folder", "lab_cwd", "", about, os.getcwd())
    about = "Ranks that torchrun starts on this machine. 0: the script starts without torchrun."
    limits: Any = {"min_value": 0, "max_value": RANKS_LIMIT, "value": 0, "help": about}
    ranks = st.number_input("torchrun processes", key="lab_ranks", **limits, **_KEPT)
    about = "Search for the fastest settings and write a patch, or measure changes of your own."
    kind = segments("Compare", [TUNE, COMPARE], "lab_kind", help=about, **_KEPT)
    fields: dict[str, Any]
    if kind == TUNE:
        about = "The time limit. Settings that are not decided by then have no verdict."
        minutes = st.number_input("Minutes", 1, 24 * 60, 20, key="lab_minutes", help=about, **_KEPT)
        st.caption(
            "Measures each setting that needs no edit, combines the faster ones, confirms the "
            "combination, and writes a patch of the script."
        )
        lines = script_plan.tuning_candidates(granted_cores() // (ranks or 1))
        fields, options = {"minutes": minutes}, ["tune", "--minutes", str(minutes)]
    else:
        about = "One per line: settings, NAME: ARGUMENTS, env:NAME=VALUE, python:PATH, rev:NAME."
        more: Any = {"placeholder": _EXAMPLES, "height": 130, "help": about, **_KEPT}
        text = str(st.text_area("Variants", key="lab_variants", **more))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        rounds, steps, find_best = length_fields()
        fields = {"max_rounds": rounds, "steps": steps, "find_best": find_best}
        options = ["lab", *(word for line in lines for word in ("--variant", line))]
        options += ["--max-rounds", str(rounds), *(("--steps", str(steps)) if steps else ())]
        options += [] if find_best else ["--no-combination"]
    place = st.container(gap="xsmall", key="lab_begin")
    if simulated:
        note("science", "The GPU is simulated: a script that uses it is not measured.")
    try:
        load_scipy()
        script = _script(target, arguments, folder, ranks or None)
        if not lines:
            raise UsageError("Name at least one variant.")
        variants = tuple(script_plan.parse_variant(line, Path(script.cwd)) for line in lines)
        plan = (script_plan.TunePlan if kind == TUNE else script_plan.ScriptPlan)(
            script=script, variants=variants, **fields
        )
    except (UsageError, ConfigError, SweepError) as error:
        return LabForm(None, str(error).removeprefix("--variant: "), place)
    options += ["--nproc-per-node", str(ranks)] if ranks else []
    module = ["-m"] if script.is_module else []
    words = (*options, *module, script.target, *script.arguments)
    command = f"cd {shlex.quote(script.cwd)} && {shlex.join(['stepscope', *words])}"
    place.code(command, language="bash", wrap_lines=True)
    return LabForm(plan, None, place, words)


def _text(label: str, key: str, placeholder: str, about: str, value: str = "") -> str:
    more: Any = {"placeholder": placeholder, "help": about, **_KEPT}
    return str(st.text_input(label, value, key=key, **more)).replace("\0", "").strip()


def _script(
    target: str, arguments: str, folder: str, ranks: int | None
) -> script_plan.ScriptCommand:
    if not target:
        raise UsageError("Name a script.")
    cwd = os.path.expanduser(folder)
    if not os.path.isdir(cwd):
        raise UsageError(f"folder: must be an existing folder, got {folder[:120]!r}. Name another.")
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"arguments: cannot be split ({error}). Close the quotes.") from error
    is_module, name = target.startswith("-m "), target.removeprefix("-m ").strip()
    if not is_module:
        _check_python(Path(cwd, name))
    where: Any = {"cwd": Path(cwd).resolve(), "nproc_per_node": ranks}
    return script_plan.script_command(name, words, is_module=is_module, **where)


def _check_python(path: Path) -> None:
    """Raise UsageError for a file that is not Python, such as a device, which has no end."""
    try:
        ast.parse(read_regular_file(path, MAX_SCRIPT_BYTES, follow_links=True))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"script: {str(path)[:200]} is not a Python script ({reason}). Name another, or a "
            "module after -m."
        ) from error
