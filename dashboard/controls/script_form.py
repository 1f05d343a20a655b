"""The lab's form for a training script of the user: what to measure, and the command of a terminal.

Its fields are not in the address: a link must not prepare a command.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.controls.lab_form import LabForm, length_fields
from dashboard.format import note
from stepscope.common.config_issue import ConfigError
from stepscope.host.environment import granted_cores
from stepscope.lab.command import UsageError
from stepscope.lab.folder import SweepError
from stepscope.lab.plan import SweepPlan
from stepscope.lab.script_plan import (
    ScriptCommand,
    ScriptPlan,
    TunePlan,
    parse_variant,
    script_command,
    tuning_candidates,
)
from stepscope.lab.statistics import load_scipy
from stepscope.run.rank_info import RANKS_LIMIT

TUNE = "Try all settings"
COMPARE = "Compare variants"
EXAMPLES = "bs64: --batch-size 64\ntf32\nnum_workers=4 pin_memory\nenv:OMP_NUM_THREADS=1"


@dataclass(frozen=True, slots=True)
class _Task:
    """What to measure: the plan's class, its variants as text and other fields, and the options."""

    plan: type[ScriptPlan]
    variants: list[str]
    fields: dict[str, Any]
    options: list[str]


def script_form(simulated: bool) -> LabForm:
    """Draw the form of a script and return its plan and command; `simulated`: a GPU is."""
    target = _text_field(
        "Script",
        "lab_script",
        "train.py or -m package.module",
        "A training script, relative to the working folder, or -m and a module.",
    )
    arguments = _text_field(
        "Arguments",
        "lab_arguments",
        "--epochs 90 --out {out}",
        "{out} becomes a new folder of each trial, {seed} a number per round.",
    )
    folder = _text_field(
        "Working folder",
        "lab_cwd",
        "",
        "Trials run here, as in a terminal. No trial may change a file in it.",
        value=os.getcwd(),
    )
    ranks = st.number_input(
        "torchrun processes",
        min_value=0,
        max_value=RANKS_LIMIT,
        value=0,
        key="lab_ranks",
        help="Ranks that torchrun starts on this machine. 0: the script starts without torchrun.",
        persist_state="session",
    )
    kind = st.segmented_control(
        "Compare",
        [TUNE, COMPARE],
        default=TUNE,
        required=True,
        key="lab_kind",
        help="Search for the fastest settings and write a patch, or measure changes of your own.",
        label_visibility="collapsed",
        persist_state="session",
    )
    task = _tune_fields(ranks) if kind == TUNE else _compare_fields()
    place = st.container(gap="xsmall", key="lab_begin")
    if simulated:
        note("science", "The GPU is simulated: a script that uses it is not measured.")
    try:
        load_scipy()
        script = _command(target, arguments, folder, ranks)
        plan = _plan(task, script)
    except (UsageError, ConfigError, SweepError) as error:
        return LabForm(None, str(error).removeprefix("--variant: "), place)
    words = list(task.options)
    if ranks:
        words += ["--nproc-per-node", str(ranks)]
    if script.is_module:
        words.append("-m")
    words += [script.target, *script.arguments]
    command = f"cd {shlex.quote(script.cwd)} && {shlex.join(['stepscope', *words])}"
    place.code(command, language="bash", wrap_lines=True)
    return LabForm(plan, None, place, tuple(words))


def _tune_fields(ranks: int) -> _Task:
    minutes = st.number_input(
        "Minutes",
        min_value=1,
        max_value=24 * 60,
        value=20,
        key="lab_minutes",
        help="The time limit. Settings that are not decided by then have no verdict.",
        persist_state="session",
    )
    st.caption(
        "Measures each setting that needs no edit, combines the faster ones, confirms the "
        "combination, and writes a patch of the script."
    )
    variants = tuning_candidates(granted_cores() // (ranks or 1))
    return _Task(TunePlan, variants, {"minutes": minutes}, ["tune", "--minutes", str(minutes)])


def _compare_fields() -> _Task:
    text = st.text_area(
        "Variants",
        key="lab_variants",
        placeholder=EXAMPLES,
        height=130,
        help="One per line: settings, NAME: ARGUMENTS, env:NAME=VALUE, rev:NAME.",
        persist_state="session",
    )
    variants = [line.strip() for line in str(text).splitlines() if line.strip()]
    rounds, steps, find_best = length_fields()
    options = ["lab"]
    for variant in variants:
        options += ["--variant", variant]
    options += ["--max-rounds", str(rounds)]
    if steps:
        options += ["--steps", str(steps)]
    if not find_best:
        options.append("--no-combination")
    fields = {"max_rounds": rounds, "steps": steps, "find_best": find_best}
    return _Task(ScriptPlan, variants, fields, options)


def _text_field(label: str, key: str, placeholder: str, about: str, value: str = "") -> str:
    text = st.text_input(
        label, value, key=key, placeholder=placeholder, help=about, persist_state="session"
    )
    return str(text).replace("\0", "").strip()


def _plan(task: _Task, script: ScriptCommand) -> SweepPlan:
    if not task.variants:
        raise UsageError("Name at least one variant.")
    variants = tuple(parse_variant(line, Path(script.cwd)) for line in task.variants)
    return task.plan(script=script, variants=variants, **task.fields)


def _command(target: str, arguments: str, folder: str, ranks: int) -> ScriptCommand:
    if not target:
        raise UsageError("Name a script.")
    cwd = os.path.expanduser(folder)
    if not os.path.isdir(cwd):
        raise UsageError(f"folder: must be an existing folder, got {folder[:120]!r}. Name another.")
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"arguments: cannot be split ({error}). Close the quotes.") from error
    is_module = target.startswith("-m ")
    name = target.removeprefix("-m ").strip()
    if not is_module and not Path(cwd, name).is_file():  # a device may have no end
        raise UsageError(f"script: no file {str(Path(cwd, name))[:200]}. Name a Python script.")
    return script_command(
        name, words, is_module=is_module, cwd=Path(cwd).resolve(), nproc_per_node=ranks or None
    )
