"""Commands of `stepscope`, called in this process."""

from __future__ import annotations

import pytest

from stepscope.cli import main


def diagnose(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run `stepscope diagnose`; return its output and its errors."""
    assert main(["diagnose", *words]) == code
    said = capsys.readouterr()
    return said.out, said.err
