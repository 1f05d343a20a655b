"""These tests need the simulator in this Python: they skip, or fail under --require-gpu."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

MISSING = "the CUDA simulator is not installed in this Python: `make test-cuda` sets it up"


@pytest.fixture(autouse=True)
def cudasim(request: pytest.FixtureRequest) -> ModuleType:
    """Return the simulator's Python side."""
    try:
        return importlib.import_module("cudasim")
    except ImportError:
        required = request.config.getoption("--require-gpu", default=False)
        return (pytest.fail if required else pytest.skip)(MISSING)
