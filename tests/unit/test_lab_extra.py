"""The lab without SciPy."""

from __future__ import annotations

import sys

import pytest

from stepscope.lab.folder import SweepError
from stepscope.lab.statistics import Rules, load_scipy


def test_a_missing_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_scipy.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    rules = Rules(looks=(5, 8, 12), max_rounds=11, alpha=0.049)
    with pytest.raises(SweepError, match=r"stepscope\[lab\]"):
        rules.level(1)
