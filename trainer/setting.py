"""A setting: what is known of one field of RunConfig, and the check of its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue

_METADATA = "setting"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingInfo:
    """One field of RunConfig, as the sidebar, the URL and the lab need it.

    `group` is the sidebar's group, empty for those that are always visible or that only the
    workloads `read_by` use. `limits` are inclusive. `choices` has the label of each value that the
    page offers. `in_lab`: the lab offers it as a variant.
    """

    label: str
    help: str = ""
    group: str = ""
    limits: tuple[float, float] | None = None
    pattern: str | None = None
    constraint: str = ""
    choices: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    read_by: tuple[StrEnum, ...] = ()
    in_lab: bool = False
    default: Any = None


def setting(default: Any, label: str, help: str = "", group: str = "", **options: Any) -> Any:
    """Return a dataclass field of a setting; for the arguments see SettingInfo."""
    about = SettingInfo(label=label, help=help, group=group, default=default, **options)
    return dataclasses.field(default=default, metadata={_METADATA: about})


def settings_of(config: type) -> dict[str, SettingInfo]:
    """Return the settings of a dataclass by the name of their field, in its order."""
    return {spec.name: spec.metadata[_METADATA] for spec in dataclasses.fields(config)}


def check(name: str, about: SettingInfo, value: Any, *, from_text: bool = False) -> Any:
    """Return the value in the type of its setting; with `from_text`, of a text. Raises ConfigError.

    >>> check("epochs", SettingInfo(label="Epochs", limits=(1, 9), default=3), "7", from_text=True)
    7
    """
    kind = type(about.default)
    try:
        return msgspec.convert(value, _annotated(kind, about), strict=not from_text)
    except msgspec.ValidationError:
        reason = f"must be {_constraint(kind, about)}, got {value!r:.60}"
    remedy = "Choose one of these" if issubclass(kind, StrEnum) else "Choose another value"
    raise ConfigError(ConfigIssue(name, reason, remedy, about.label)) from None


def _annotated(kind: type, about: SettingInfo) -> Any:
    if about.limits is not None:
        low, high = about.limits
        return Annotated[kind, msgspec.Meta(ge=low, le=high)]
    if about.pattern is not None:
        return Annotated[kind, msgspec.Meta(pattern=rf"^(?:{about.pattern})\Z")]
    return kind


def _constraint(kind: type, about: SettingInfo) -> str:
    if about.constraint:
        return about.constraint
    if issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    if about.limits is not None:
        low, high = about.limits
        number = "an integer" if kind is int else "a number"
        return f"{number} from {low:,.15g} to {high:,.15g}"
    return "on or off" if kind is bool else "a text"
