"""The packages import one way: app.py -> dashboard -> trainer -> stepscope."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_process import ROOT, child, run_python

PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    # An integration imports its library: only a script that has loaded it imports that file.
    if module.name.endswith(("__main__", ".tensorboard")) or ".integrations." in module.name:
        continue
    if ".lessons." in module.name:  # a program, which runs when it is imported
        continue
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


ABOVE = {"streamlit", "plotly", "dashboard"}
LIBRARIES = {"torch", "pandas", "transformers", "lightning", "tensorboard", "pyarrow"}


@pytest.mark.parametrize(
    ("package", "banned"), [("stepscope", ABOVE | LIBRARIES | {"trainer"}), ("trainer", ABOVE)]
)
def test_a_package_loads_nothing_from_above(package: str, banned: set[str]) -> None:
    found = run_python("-c", PROBE, package)
    assert found.returncode == 0
    assert not banned & set(found.stdout.split())


def imported(file: Path) -> Iterator[str]:
    """Yield each name that a file imports from the tests, as a path of modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ("tests." if node.level else "") + (node.module or "")
            yield from (f"{module}.{name.name}" for name in node.names)


def test_shared_code_of_tests_is_in_support() -> None:
    """Only pytest imports the module of a test."""
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for name in imported(file)
        if name.startswith("tests.") and ".test_" in name
    ]
    assert found == []


def test_the_page_starts_without_waiting_for_torch() -> None:
    modules = "dashboard.api.routes, dashboard.controls.sidebar"
    assert child(f"import {modules}, sys; print('torch' in sys.modules)").strip() == "False"
