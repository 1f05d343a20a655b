"""Names and words of the product: counts of known exceptions that may only fall."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("stepscope", "trainer", "dashboard")
DIALECT = re.compile(
    r"\b(say|says|said|tell|tells|told|hear|hears|heard|beside|anew|whoever|nobody|somebody|"
    r"anybody|stands?|so many|belong into|of anybody|number 0)\b"
)
"""Words that docstrings do not use: functions return, raise, log and store."""
MAX_DIALECT = 490
CALLBACKS = {"StepscopeCallback"}
"""Each framework's integration has its own class of this name."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_words_of_the_dialect_become_fewer_in_docstrings() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = sum(
        len(DIALECT.findall(ast.get_docstring(node) or ""))
        for _, module in modules()
        for node in ast.walk(module)
        if isinstance(node, kinds)
    )
    assert found <= MAX_DIALECT, "rewrite the docstring with the field's own words"


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path, module in modules():
        if "lessons" in path.parts:  # programs to read, each by itself
            continue
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert {name: shared[name] for name in shared if name not in CALLBACKS} == {}
