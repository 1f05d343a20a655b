"""`patch.json` in the folder of a sweep over a script: its best combination as a patch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import read_json
from stepscope.lab.folder import read_samples, write_json
from stepscope.lab.patch import Patch, make_patch
from stepscope.lab.script_plan import ScriptPlan, TunePlan, words_of

PATCH_JSON, PATCH_DIFF = "patch.json", "patch.diff"
_MAX_BYTES = 2**20


def write_patch(folder: Path, plan: ScriptPlan, sweep: Mapping[str, Any]) -> Patch:
    """Write and return the patch of the best combination, empty if it is not faster.

    A sweep of `stepscope lab` without settings in it has no file. PATCH_DIFF is for `git apply`.
    Raises OSError.
    """
    best = sweep.get("best") or {}
    pays = best.get("verdict") == "faster" and sweep["status"] == "finished"
    words = words_of(best["changes"]) if pays else []
    name, settings = " + ".join(best.get("arms", ())), []
    for one in read_samples(folder) if words else ():
        if one.ok and one.name == name:
            settings = one.settings
    source, path = "", Path(plan.script.cwd, plan.script.target)
    if settings and not plan.script.is_module:
        try:
            source = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            source = ""  # every change is listed by hand
    name = os.path.relpath(path, plan.script.cwd)
    name = path.name if name.startswith("..") else name
    patch = make_patch(source, str(path), name, settings)
    if words or isinstance(plan, TunePlan):
        by_hand = [asdict(one) for one in patch.by_hand]
        write_json(folder / PATCH_JSON, {"diff": patch.diff, "by_hand": by_hand})
    if patch.diff:
        (folder / PATCH_DIFF).write_bytes(patch.diff.encode())
    return patch


def read_patch(folder: Path) -> Patch | None:
    """Return the patch of a sweep, None without one. Raises OSError, and ValueError if invalid."""
    try:
        return msgspec.convert(read_json(folder / PATCH_JSON, _MAX_BYTES), Patch)
    except FileNotFoundError:
        return None
