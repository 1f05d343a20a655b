"""The settings of a sweep as a change of the script's source text, which is not executed."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import read_json
from stepscope.lab.folder import read_trials, write_json
from stepscope.lab.script_plan import ScriptPlan, TunePlan, words_of
from stepscope.lab.verdict_text import is_recommended
from stepscope.settings.setting import AppliedSetting

LOADER = {"num_workers": 5, "pin_memory": 7, "persistent_workers": 13, "prefetch_factor": 12}
"""Arguments of DataLoader, with a lower bound of their position: fewer positional ones are safe."""
IMPORT_LEVEL = ("tf32", "cudnn_benchmark", "threads")
WHERE = {
    "bf16": "around the forward pass and the loss",
    "channels_last": "after the model is on its device, and for each batch of images",
    "compile": "after the model and its optimizer are constructed",
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

    What `ScriptEdit` does not change is listed by hand.
    """
    script = ScriptEdit(source)
    here = os.path.realpath(path)
    manual: dict[str, list[str]] = {}
    places = [(place, setting) for setting in settings for place in setting.places]
    # From the last call to the first, so that the lines of the other calls stay.
    for place, setting in sorted(places, key=lambda pair: -pair[0].line):
        # The call at a refused place has other arguments at other times.
        is_refused = place in setting.refused_places or None in setting.refused_places
        is_here = os.path.realpath(place.file) == here and not is_refused
        if not is_here or not script.set_keyword(setting, place.line):
            where = f"{os.path.basename(place.file)}, line {place.line}"
            manual.setdefault(setting.name, []).append(where)
    by_hand = []
    for setting in settings:
        if setting.name in IMPORT_LEVEL:
            if script.add_lines(setting.lines):
                continue
            where = "after the imports"
        elif setting.name in WHERE:
            where = WHERE[setting.name]
        elif setting.places and setting.name not in manual:
            continue
        else:
            calls = sorted(manual.get(setting.name, []))
            where = "; ".join(calls) or "at the call that has this argument"
        by_hand.append(ManualChange(setting.name, setting.lines, where))
    return Patch(_diff(source, script.text, name), by_hand, script.text)


def _diff(before: str, after: str, name: str) -> str:
    """Return the unified diff of two texts, whose lines end with a line feed only."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    missing_end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + missing_end for line in lines)


class ScriptEdit:
    """The source text of a script, which is never executed.

    A change is made only if the syntax tree of the result is that of the text with exactly this
    change. The methods return whether it was made.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def set_keyword(self, setting: AppliedSetting, line: int) -> bool:
        """Set a keyword argument in the only call of torch's class at a line."""
        tree = _parse(self.text)
        if tree is None or setting.name not in (*LOADER, "fused"):
            return False
        names = {"DataLoader"}
        if setting.name == "fused":
            names = {text.partition("(")[0] for text in setting.lines}
        calls = [call for call in _calls(tree, names) if call.lineno <= line <= _end(call)[0]]
        if len(calls) != 1:
            return False
        (call,) = calls
        has_stars = any(isinstance(one, ast.Starred) for one in call.args)
        if has_stars or len(call.args) > LOADER.get(setting.name, len(call.args)):
            return False
        new = ast.Constant(setting.value)
        given = {keyword.arg: keyword for keyword in call.keywords}
        if setting.name in given:
            former = given[setting.name].value
            if not isinstance(former, ast.Constant):
                return False  # such as args.workers, an option that would have no effect
            given[setting.name].value = new
            start = self._offset(former.lineno, former.col_offset)
            return self._replace(start, self._offset(*_end(former)), repr(setting.value), tree)
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if None in given or not arguments:  # **kwargs may have it
            return False
        call.keywords.append(ast.keyword(setting.name, new))
        last = max(self._offset(*_end(one)) for one in arguments)
        return self._replace(last, last, f", {setting.name}={setting.value!r}", tree)

    def add_lines(self, lines: Sequence[str]) -> bool:
        """Add lines after the block of imports that has `import torch`."""
        tree = _parse(self.text)
        if tree is None:
            return False
        imports_torch = [isinstance(one, ast.Import) and _imports_torch(one) for one in tree.body]
        if True not in imports_torch:
            return False
        at = imports_torch.index(True) + 1
        while at < len(tree.body) and isinstance(tree.body[at], (ast.Import, ast.ImportFrom)):
            at += 1
        if at == len(tree.body):  # nothing follows the imports
            return False
        line, _ = _end(tree.body[at - 1])
        new = "".join(f"{text}\n" for text in lines)
        tree.body[at:at] = ast.parse(new).body
        start = self._offset(line + 1, 0)
        return self._replace(start, start, new, tree)

    def _offset(self, line: int, column: int) -> int:
        """Return the byte of a place of the syntax tree, whose columns are bytes."""
        ends = [found.end() for found in re.finditer(rb"\r\n|\r|\n", self.text.encode())]
        return [0, *ends][line - 1] + column

    def _replace(self, start: int, end: int, new: str, expected: ast.Module) -> bool:
        """Put `new` in place of some bytes if the text parses to the expected tree then."""
        data = self.text.encode()
        result = (data[:start] + new.encode() + data[end:]).decode(errors="replace")
        tree = _parse(result)
        if tree is None or ast.dump(tree) != ast.dump(expected):
            return False
        self.text = result
        return True


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _calls(tree: ast.Module, names: Set[str]) -> Iterator[ast.Call]:
    """Yield the calls of classes by their names, such as `SGD(…)` and `torch.optim.SGD(…)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in names:
                yield node


def _imports_torch(statement: ast.Import) -> bool:
    return any(name.name == "torch" and name.asname is None for name in statement.names)


def _end(node: ast.expr | ast.keyword | ast.stmt) -> tuple[int, int]:
    """Return the last line of a node, and the column after it."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def write_patch(folder: Path, plan: ScriptPlan, sweep: Mapping[str, Any]) -> Patch:
    """Write and return the patch of the best combination, empty if not faster. Raises OSError."""
    words: list[str] = []
    settings: list[AppliedSetting] = []
    if sweep["status"] == "finished" and is_recommended(sweep["best"]):
        best = sweep["best"]
        words = words_of(best["changes"])
        name = " + ".join(best["variants"])
        taken = [one for one in read_trials(folder) if one.ok and one.name == name]
        settings = taken[-1].settings if words else []
    source = ""
    path = Path(plan.script.cwd, plan.script.target)
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
