"""Names, words and documents of the product."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("stepscope", "trainer", "dashboard")
DIALECT = re.compile(
    r"\b(say|says|said|tell|tells|told|hear|hears|heard|beside|anew|whoever|nobody|somebody|"
    r"anybody|stands?|so many|belong into|of anybody|number 0)\b"
)
"""Words that docstrings, comments and messages do not use."""
CALLBACKS = {"StepscopeCallback"}
"""Each framework's integration has its own class of this name."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_no_text_has_words_of_the_dialect() -> None:
    found = []
    for path, module in modules():
        with path.open("rb") as file:
            comments = [one for one in tokenize.tokenize(file.readline) if one.type == COMMENT]
        texts = [(one.start[0], one.string) for one in comments]
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                texts.append((node.lineno, re.sub("`[^`]*`", "", node.value)))  # without code
        found += [f"{path}:{line}: {text}" for line, text in texts if DIALECT.search(text)]
    assert found == []


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path, module in modules():
        if "lessons" in path.parts:  # separate programs to read
            continue
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert shared.keys() <= CALLBACKS, shared


def test_the_design_document_has_every_folder_and_existing_paths() -> None:
    text = (ROOT / "docs/design.md").read_text()
    paths = re.findall(r"`((?:stepscope|trainer|dashboard|docs|tests|examples)/[\w./-]*)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    drawing = text.partition("## Folders")[2].partition("## ")[0]
    folders = [file.parent.name for one in PACKAGES for file in (ROOT / one).glob("*/__init__.py")]
    assert [name for name in folders if f"{name}/" not in drawing] == []


def test_the_gpu_document_lists_every_cuda_test() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/gpu/README.md").read_text(), re.M))
    written = {
        name
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.M)
    }
    assert listed == written
