"""The lab's form for a script of the user: its command, and what is compared.

The fields are not part of the page's address: a link must not prepare a command.
"""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.controls.lab_form import LabForm, length_fields
from dashboard.format import note, segments
from stepscope.common.config_issue import ConfigError
from stepscope.common.files import read_regular_file
from stepscope.lab import script_plan
from stepscope.lab.command import UsageError
from stepscope.lab.folder import SweepError
from stepscope.lab.statistics import load_scipy
from stepscope.run.rank_info import RANKS_LIMIT

TUNE, COMPARE = "Try all settings", "Compare variants"
MAX_SCRIPT_BYTES = 2**20
_KEPT: Any = {"persist_state": "session"}
_EXAMPLES = "bs64: --batch-size 64\ntf32\nnum_workers=4 pin_memory\nenv:OMP_NUM_THREADS=1"


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
        lines = script_plan.tuning_candidates(len(os.sched_getaffinity(0)) // (ranks or 1))
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
        arms = tuple(script_plan.variant(line, Path(script.cwd)) for line in lines)
        plan = (script_plan.TunePlan if kind == TUNE else script_plan.ScriptPlan)(
            script=script, arms=arms, **fields
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
    """Return the command of the fields. Raises UsageError, SweepError."""
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
