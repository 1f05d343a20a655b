"""The base class of the settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

import stepscope

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


_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ")
_OWN_FOLDER = str(Path(stepscope.__file__).parent)


class SettingError(ValueError):
    """The words of a setting are invalid; the message is for the terminal."""


class Moment(StrEnum):
    """When a setting acts; the value is the reason for a setting that was never reached."""

    IMPORT = "The script did not import torch."
    LOADER = "The script did not construct a DataLoader."
    OPTIMIZER = "The script did not construct an optimizer of torch."
    TRAINING = "The script did not call a model or backward() with gradients enabled."
    MODEL = (
        "The script did not call a model whose parameters an optimizer of torch updates, or only "
        "in functions that it compiles."
    )


class Training(NamedTuple):
    """What the script trains; `model` is None at the moment TRAINING."""

    device: Any
    model: Any = None
    optimizers: tuple[Any, ...] = ()


class Setting:
    """One setting with its value, and what happened to it in this process.

    The subject of `problem` and `enter` depends on `moment`: torch at IMPORT, the arguments of the
    call at LOADER, the optimizer at OPTIMIZER, otherwise `Training`.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    """The lines of code that apply the setting by hand, with {value}."""
    moment: ClassVar[Moment]
    bounds: ClassVar[tuple[int, int] | None] = None
    """The least and the largest value; None for a setting without a value."""

    def __init__(self, text: str | None = None) -> None:
        """Parse the value. Raises SettingError."""
        self.value = self._parsed(text)
        self.places: list[CallPlace | None] = []
        """Where the setting was entered."""
        self.refusals: dict[CallPlace | None, str] = {}
        """The reasons by place, None for an unknown one."""
        self.failed: str | None = None
        self.is_probe = False
        """True if `problem` is asked, but the setting is not entered."""
        self._applies = False

    def _parsed(self, text: str | None) -> Any:
        if self.bounds is None:
            if text is None:
                return True
            raise SettingError(f"{self.name}: takes no value, got {text!r:.80}. Remove it.")
        least, most = self.bounds
        if text is None or not text.isdecimal() or not least <= int(text[:9]) <= most:
            raise SettingError(
                f"{self.name}: must be an integer from {least} to {most}, got {text!r:.80}. "
                f"Use {self.name}={max(least, 4)}."
            )
        return int(text)

    def problem(self, subject: Any) -> str | None:
        """Return the reason why the setting does not apply to the subject, or None."""
        return None

    def enter(self, subject: Any) -> None:
        """Apply the setting to the subject, for which `problem` returned None."""
        raise NotImplementedError

    def after_step(self, optimizer: Any) -> None:
        """Act after a step of any optimizer, once the setting has been entered."""

    def evidence(self) -> tuple[bool, str]:
        """Return True and what shows that the setting took effect, or False and the reason."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        return self.code.format(value=self.value).splitlines()

    def apply(self, subject: Any, place: CallPlace | None = None) -> None:
        """Enter the setting, or keep the reason and the place of its refusal."""
        reason = self.problem(subject)
        if reason is not None:
            self.refusals[place] = reason
        elif self.is_probe:
            self._applies = True
        else:
            self.enter(subject)
            self.places.append(place)

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function; its exception becomes the reason of the refusal."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - no error of a setting may end a training
            self.failed = f"Failed with {type(error).__name__}: {error}".split("\n")[0]

    def as_json(self) -> dict[str, Any]:
        """Return the entry in run.json."""
        state, text = self._outcome()
        entry = AppliedSetting(
            name=self.name,
            value=self.value,
            state=state,
            text=text,
            lines=self.lines(),
            places=[place for place in dict.fromkeys(self.places) if place],
            refused_places=list(self.refusals),
        )
        values: dict[str, Any] = msgspec.to_builtins(entry)
        return values

    def _outcome(self) -> tuple[SettingState, str]:
        """Return the state, and its evidence or reason."""
        evidence: list[tuple[bool, str]] = []
        if self.places:
            self.guard(lambda: evidence.append(self.evidence()))
        if self.failed is not None:
            return "refused", self.failed
        if self._applies:
            return "applies", ""
        first_places = {reason: place for place, reason in reversed(self.refusals.items())}
        if evidence:
            is_in_effect, text = evidence[0]
            for reason in dict.fromkeys(self.refusals.values()):
                place = first_places[reason]
                at_line = f" at line {place.line}" if place else ""
                text += f" Not applied{at_line}: {reason}"
            return "in effect" if is_in_effect else "refused", text
        if self.refusals:
            return "refused", next(iter(self.refusals.values()))
        return "not reached", self.moment.value


def script_place() -> CallPlace | None:
    """Return the innermost place of the call stack in the script; None inside of a library."""
    frame: FrameType | None = sys._getframe(1)
    torch = str(Path(sys.modules["torch"].__file__ or "").parent)
    folders = (_OWN_FOLDER, torch, sys.base_prefix + "/lib/")
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(folders) and not any(part in file for part in _LIBRARIES):
            return CallPlace(file, frame.f_lineno)
        frame = frame.f_back
    return None
