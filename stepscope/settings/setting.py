"""The base class of the settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import msgspec

import stepscope
from stepscope.settings.applied import AppliedSetting, CallPlace, SettingState

_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ")
_OWN_FOLDER = str(Path(stepscope.__file__).parent)
_MAX_REFUSALS = 3  # Maximum number of refused places in one text.


class SettingError(ValueError):
    """The words of a setting are invalid; the message is for the terminal."""


class Moment(StrEnum):
    """When a setting acts; the value is the reason for a setting that was never reached."""

    IMPORT = "The script did not import torch."
    ATTENTION = "No uncompiled training code of the script called scaled_dot_product_attention."
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
    """One technique with its value, and what happened to it in this process.

    The subject of `problem` and `enter` depends on `moment`: torch at IMPORT, the arguments of the
    call at LOADER and ATTENTION, the optimizer at OPTIMIZER, otherwise `Training`.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    """The lines of code that apply the setting by hand, with {value}."""
    moment: ClassVar[Moment]
    bounds: ClassVar[tuple[int, int] | None] = None
    """The least and the largest value; None for a setting without a value."""
    choices: ClassVar[tuple[str, ...]] = ()
    """The values of a setting whose value is no number."""
    default: ClassVar[int | None] = None
    """The value without a `=`; None if the setting needs one."""

    def __init__(self, text: str | None = None) -> None:
        """Parse the value. Raises SettingError."""
        self.value: Any = True if self.bounds is None else self.default
        self.places: list[CallPlace | None] = []
        """Where the setting was entered."""
        self.refusals: dict[str, CallPlace | None] = {}
        self.refused_places: dict[CallPlace | None, None] = {}
        """The places of all refusals in order, None for an unknown one."""
        self.failed: str | None = None
        self.is_probe = False
        """True if `problem` is asked, but the setting is not entered."""
        self._applies = False
        if self.choices:
            if text not in self.choices:
                known = ", ".join(self.choices)
                raise SettingError(f"{self.name}: Use one of {known}, got {text!r:.80}.")
            self.value = text
        elif self.bounds is None and text is not None:
            raise SettingError(f"{self.name}: takes no value, got {text!r:.80}. Remove it.")
        if self.bounds is not None and (text is not None or self.default is None):
            least, most = self.bounds
            if not (text or "").isdecimal() or not least <= int(str(text)[:9]) <= most:
                raise SettingError(
                    f"{self.name}: must be an integer from {least} to {most}, got {text!r:.80}. "
                    f"Use {self.name}={max(least, 4)}."
                )
            self.value = int(str(text))

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
        if reason is None and self.is_probe:
            self._applies = True
        elif reason is None:
            self.enter(subject)
            self.places.append(place)
        else:
            self.refused_places[place] = None
            if len(self.refusals) < _MAX_REFUSALS:
                self.refusals.setdefault(reason, place)

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function; its exception becomes the reason of the refusal."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - no error of a setting may end a training
            self.failed = f"Failed with {type(error).__name__}: {error}".split("\n")[0]

    def as_json(self) -> dict[str, Any]:
        """Return the entry in run.json."""
        found: list[tuple[bool, str]] = []
        if self.places:
            self.guard(lambda: found.append(self.evidence()))
        state: SettingState = "not reached"
        text: str = self.moment.value
        at = next((place for place in self.places if place is not None), None)
        if self.failed is not None:
            state, text = "refused", self.failed
        elif self._applies:
            state, text = "applies", ""
        elif found:
            state, text = "in effect" if found[0][0] else "refused", found[0][1]
            for reason, place in self.refusals.items():
                text += f" Not applied{f' at line {place.line}' if place else ''}: {reason}"
        elif self.refusals:
            state, (text, at) = "refused", next(iter(self.refusals.items()))
        entry = AppliedSetting(
            name=self.name,
            value=self.value,
            state=state,
            text=text,
            lines=self.lines(),
            at=at,
            places=[place for place in dict.fromkeys(self.places) if place],
            refused_places=list(self.refused_places),
        )
        values: dict[str, Any] = msgspec.to_builtins(entry)
        return values


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
