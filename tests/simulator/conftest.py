"""These tests need the simulator in this Python: they skip, or fail under --require-gpu."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

from tests.conftest import Need

MISSING = "the CUDA simulator is not installed in this Python: `make test-cuda` sets it up"


@pytest.fixture(autouse=True)
def cudasim(need: Need) -> ModuleType:
    """Return the simulator's Python side."""
    need(None if importlib.util.find_spec("cudasim") else MISSING)
    return importlib.import_module("cudasim")
