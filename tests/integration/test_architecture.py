"""The packages import one way: app.py -> dashboard -> trainer -> stepscope."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        (
            "stepscope",
            {
                "torch",
                "streamlit",
                "plotly",
                "pandas",
                "trainer",
                "dashboard",
                "transformers",
                "lightning",
                "tensorboard",
                "pyarrow",
            },
        ),
        ("trainer", {"streamlit", "plotly", "dashboard"}),
    ],
)
def test_a_package_loads_nothing_from_above(package: str, banned: set[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROBE, package], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not banned & set(found.stdout.split())


def imported(file: Path) -> Iterator[str]:
    """Yield each name that a file of the tests imports from them, as a path of modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom):
            module = ("tests." if node.level else "") + (node.module or "")
            if module.partition(".")[0] == "tests":
                yield from (f"{module}.{name.name}" for name in node.names)


def test_what_tests_share_lies_in_support() -> None:
    """A test's module is imported by pytest alone: what others need of it is in tests/support."""
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for name in imported(file)
        if ".test_" in name
    ]
    assert found == []


def test_the_page_starts_without_waiting_for_torch() -> None:
    modules = "dashboard.api.routes, dashboard.controls.sidebar"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
