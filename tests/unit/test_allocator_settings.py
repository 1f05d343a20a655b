"""The allocator's settings in force: the environment's, and those the program has set."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from stepscope.memory.allocator import NO_SPLIT, VARIABLES, settings_of, split_reason


@pytest.mark.parametrize(
    ("environment", "program", "reason"),
    [
        ("", "", None),
        ("expandable_segments:True", None, NO_SPLIT),
        ("max_split_size_mb:64,expandable_segments:true", "", NO_SPLIT),
        ("expandable_segments:True", "expandable_segments:False", None),
        ("", "expandable_segments:True", NO_SPLIT),
        ("max_split_size_mb:64", "", None),
    ],
)
@pytest.mark.parametrize("variable", VARIABLES)
def test_expandable_segments_have_no_count_of_their_split(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    environment: str,
    program: str | None,
    reason: str | None,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, environment)
    native = SimpleNamespace()  # of a torch that cannot tell
    if program is not None:
        native._accelerator_getAllocatorSettings = lambda: program
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=native))
    assert split_reason() == reason


def test_settings_are_pairs_and_what_is_none_is_left_out() -> None:
    assert settings_of("") == {}
    assert settings_of("a:1,b : 2,c") == {"a": "1", "b": "2"}
