"""The packages import one way: app.py -> dashboard -> trainer -> stepscope."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    # An integration imports its library: only a script that has loaded it imports that file.
    if not module.name.endswith("__main__") and ".integrations." not in module.name:
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


def test_the_page_starts_without_waiting_for_torch() -> None:
    code = "import dashboard.routes, dashboard.controls, sys; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def python_files() -> list[Path]:
    return [
        path
        for package in ("stepscope", "trainer", "dashboard")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, functions):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 45, f"{node.name} has {length} lines"
