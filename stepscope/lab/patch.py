"""The settings of a sweep as a change of the script's source text, which is not executed."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import read_json
from stepscope.lab.folder import read_trials, write_json
from stepscope.lab.script_plan import ScriptPlan, TunePlan, words_of
from stepscope.lab.verdict_text import is_recommended
from stepscope.settings.applied import AppliedSetting, CallPlace

LOADER = {"num_workers": 5, "pin_memory": 7, "persistent_workers": 13, "prefetch_factor": 12}
"""Arguments of DataLoader, with a lower bound of their position: fewer positional ones are safe."""
IMPORT_LEVEL = ("tf32", "cudnn_benchmark", "threads")
WHERE = {
    "bf16": "around the forward pass and the loss",
    "channels_last": "after the model is on its device, and for each batch of images",
    "compile": "after the model and its optimizer are constructed",
    "gc_off": "before the training loop, and in it",
    "set_to_none": "in the training loop",
}
PATCH_JSON = "patch.json"
PATCH_DIFF = "patch.diff"
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ManualChange:
    """Lines of a setting that the patch does not contain, and where they belong."""

    setting: str
    lines: list[str]
    where: str


FP16 = ManualChange(
    "fp16",
    [
        'scaler = torch.amp.GradScaler("cuda")',
        'with torch.autocast("cuda", dtype=torch.float16):',
        "    ...  # forward and loss",
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)  # before code that reads or clips gradients",
        "scaler.step(optimizer)",
        "scaler.update()",
    ],
    "around the forward pass and the loss, and in place of backward() and step()",
)
"""What no trial can add to a script: GradScaler replaces calls of its training loop."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A unified diff (empty without a change), the rest by hand, and the patched script."""

    diff: str
    by_hand: list[ManualChange]
    text: str = ""


def make_patch(source: str, path: str, name: str, settings: Sequence[AppliedSetting]) -> Patch:
    """Return the change of the script at `path`; `name` is its name in the diff.

    A change is made only if the syntax tree of the result is that of the source with exactly this
    change; any other setting is listed by hand.
    """
    text = source
    manual: dict[str, list[CallPlace]] = {}
    here = os.path.realpath(path)
    places = [(place, one) for one in settings for place in one.places or ()]
    # From the last call to the first, so that the lines of the other calls stay.
    for place, setting in sorted(places, key=lambda pair: -pair[0].line):
        changed = None
        # The call at a refused place has other arguments at other times.
        is_refused = place in setting.refused_places or None in setting.refused_places
        if os.path.realpath(place.file) == here and not is_refused:
            changed = _with_keyword(text, setting, place)
        text = text if changed is None else changed
        if changed is None:
            manual.setdefault(setting.name, []).append(place)
    by_hand = []
    for setting in settings:
        where = WHERE.get(setting.name, "after the imports")
        if setting.name in IMPORT_LEVEL:
            changed = _with_line(text, setting.lines)
            text = text if changed is None else changed
            if changed is not None:
                continue
        elif setting.name not in WHERE:
            missing = manual.get(setting.name, [])
            if setting.places and not missing:
                continue
            calls = [
                f"{os.path.basename(one.file)}, line {one.line}"
                + " (not for all calls there)" * (one in setting.refused_places)
                for one in missing
            ]
            where = "; ".join(sorted(calls)) or "at the call that has this argument"
        by_hand.append(ManualChange(setting.name, setting.lines, where))
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", one) for one in (source, text))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    missing_end = "\n\\ No newline at end of file\n"
    ended = (line if line.endswith("\n") else line + missing_end for line in lines)
    return Patch("".join(ended), by_hand, text)


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _with_keyword(text: str, setting: AppliedSetting, place: CallPlace) -> str | None:
    """Return the source with a keyword argument in the call at a place; None if unclear."""
    tree = _parsed(text)
    if tree is None or setting.name not in (*LOADER, "fused"):
        return None
    names = ["DataLoader"]
    if setting.name == "fused":
        names = [line.partition("(")[0] for line in setting.lines]
    calls = [one for one in _calls(tree, names) if one.lineno <= place.line <= _end(one)]
    if len(calls) != 1:
        return None
    call = calls[0]
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if len(call.args) > LOADER.get(setting.name, len(call.args)):
        return None
    data, starts = _lines(text)

    def position(line: int, column: int | None) -> int:
        return starts[line - 1] + (column or 0)

    new = ast.Constant(setting.value)
    found = next((one for one in call.keywords if one.arg == setting.name), None)
    if found is not None:
        former = found.value
        if not isinstance(former, ast.Constant):
            return None  # such as args.workers, an option that would have no effect
        start = position(former.lineno, former.col_offset)
        end = position(_end(former), former.end_col_offset)
        found.value = new
        return _edited(data, start, end, repr(setting.value), tree)
    if any(one.arg is None for one in call.keywords):
        return None  # **kwargs may have it
    last = max(position(_end(one), one.end_col_offset) for one in arguments)
    call.keywords.append(ast.keyword(setting.name, new))
    return _edited(data, last, last, f", {setting.name}={setting.value!r}", tree)


def _with_line(text: str, lines: Sequence[str]) -> str | None:
    """Return the source with lines after its first block of imports; None without torch there."""
    tree = _parsed(text)
    if tree is None:
        return None
    names = [
        (at, name.asname or "torch")
        for at, one in enumerate(tree.body)
        if isinstance(one, ast.Import)
        for name in one.names
        if name.name == "torch" or (name.name.startswith("torch.") and name.asname is None)
    ]
    if not names:
        return None
    at, alias = names[0]
    while at + 1 < len(tree.body) and isinstance(tree.body[at + 1], (ast.Import, ast.ImportFrom)):
        at += 1
    data, starts = _lines(text)
    line = _end(tree.body[at])
    if line >= len(starts):  # nothing follows the imports
        return None
    new = "".join(re.sub(r"^torch\.", f"{alias}.", one) + "\n" for one in lines)
    tree.body[at + 1 : at + 1] = ast.parse(new).body
    return _edited(data, starts[line], starts[line], new, tree)


def _edited(data: bytes, start: int, end: int, new: str, expected: ast.Module) -> str | None:
    """Return the source with `new` in place of `start:end` if it parses to the expected tree."""
    result = (data[:start] + new.encode() + data[end:]).decode(errors="replace")
    tree = _parsed(result)
    same = tree is not None and ast.dump(tree) == ast.dump(expected)
    return result if same else None


def _calls(tree: ast.Module, named: Sequence[str]) -> list[ast.Call]:
    """Return the calls of classes of torch, also by the alias of an import."""
    aliases = {
        name.asname
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom)
        for name in one.names
        if name.name in named
    }
    found = []
    for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else None
        name = function.id if isinstance(function, ast.Name) else name
        if name is not None and (name in named or name in aliases):
            found.append(call)
    return found


def _end(node: ast.expr | ast.keyword | ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _lines(text: str) -> tuple[bytes, list[int]]:
    """Return the bytes of a source text, and where its lines start."""
    data = text.encode()
    return data, [0, *(one.end() for one in re.finditer(rb"\r\n|\r|\n", data))]


def write_patch(folder: Path, plan: ScriptPlan, sweep: Mapping[str, Any]) -> Patch:
    """Write and return the patch of the best combination, empty if not faster. Raises OSError."""
    words, settings = list[str](), list[AppliedSetting]()
    if sweep["status"] == "finished" and is_recommended(sweep["best"]):
        best = sweep["best"]
        words = words_of(best["changes"])
        name = " + ".join(best["variants"])
        taken = [one for one in read_trials(folder) if one.ok and one.name == name]
        settings = taken[-1].settings if words else []
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
