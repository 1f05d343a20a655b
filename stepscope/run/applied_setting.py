"""The entries of `settings` in run.json and samples.jsonl (docs/watch.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TEXT_LIMIT = 100_000
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
SettingState = Literal["in effect", "applies", "refused", "not reached"]


class CallPlace(msgspec.Struct, frozen=True):
    """File and line of a call in the script."""

    file: _Text
    line: _Count


class AppliedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a setting of `stepscope watch --with`."""

    name: _Text
    value: bool | _Count | _Text
    state: SettingState
    text: _Text
    lines: list[str]
    at: CallPlace | None
    places: list[CallPlace] = []
    refused_places: list[CallPlace | None] = []
    """Where the setting was refused; None for an unknown place."""

    @property
    def word(self) -> str:
        """The setting as a word of `stepscope watch --with`."""
        return self.name if self.value is True else f"{self.name}={self.value}"
