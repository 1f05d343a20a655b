"""docs/design.md names files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "design.md").read_text()
PACKAGES = ("stepscope", "trainer", "dashboard")


def test_each_path_in_the_text_exists() -> None:
    paths = re.findall(r"`((?:stepscope|trainer|dashboard|docs|tests|examples)/[\w./-]*)`", TEXT)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_drawing_has_every_folder() -> None:
    drawing = TEXT.partition("## Folders")[2].partition("## ")[0]
    for package in PACKAGES:
        for folder in (ROOT / package).iterdir():
            if (folder / "__init__.py").exists():
                assert f"{folder.name}/" in drawing, (
                    f"{package}/{folder.name} is not in the drawing"
                )
