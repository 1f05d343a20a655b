"""The packages import one way: app.py -> dashboard -> trainer -> stepscope."""

from __future__ import annotations

import pytest

from tests.support.child_process import child, run_python

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


def test_the_page_starts_without_waiting_for_torch() -> None:
    modules = "dashboard.api.routes, dashboard.controls.sidebar"
    assert child(f"import {modules}, sys; print('torch' in sys.modules)").strip() == "False"
