"""What happened to the settings of a script, as in run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

SettingState = Literal["in effect", "applies", "refused", "not reached"]


class CallPlace(msgspec.Struct, frozen=True):
    """File and line of a call in the script."""

    file: str
    line: int


class AppliedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `settings` in run.json: what happened to a setting of `watch --with`."""

    name: str
    value: bool | int | str
    state: SettingState
    text: str
    lines: list[str]
    places: list[CallPlace] = []
    refused_places: list[CallPlace | None] = []
    """Where the setting was refused; None for an unknown place."""

    @property
    def word(self) -> str:
        """The setting as a word of `stepscope watch --with`."""
        return self.name if self.value is True else f"{self.name}={self.value}"


def applied_settings(run_json: Mapping[str, Any]) -> list[AppliedSetting]:
    """Return the settings applied to a script; none if an entry is invalid."""
    try:
        return msgspec.convert(run_json.get("settings") or [], list[AppliedSetting])
    except msgspec.ValidationError:
        return []
