"""docs/gpu/README.md lists every CUDA test, with where it was run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_cuda_test_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/gpu/README.md").read_text(), re.M))
    written = {
        name
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.M)
    }
    assert listed == written
