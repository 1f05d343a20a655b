"""Reads alerts.toml: what alerts, and who is told. Never from the page, and never from a run.

The file names a command that Stepscope runs, so it must belong to this user (or root) and nobody
else may write it. What is wrong in it is left out and said; the rest of it counts.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stepscope.alerts import channels, checks
from stepscope.alerts.channels import Command, Webhook
from stepscope.alerts.fields import Wrong
from stepscope.alerts.rules import DEFAULTS, Rule

VARIABLE = "STEPSCOPE_ALERTS"
"""Names the file, or is "off" for no alerts at all."""
OFF = "off"
SIZE_LIMIT = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What alerts and who is told; `path` is None where alerts are off.

    `found`: there is such a file. `problems` say what is wrong with it, a sentence each.
    """

    rules: tuple[Rule, ...] = DEFAULTS
    command: Command | None = None
    webhook: Webhook | None = None
    path: Path | None = None
    found: bool = False
    problems: tuple[str, ...] = field(default=())

    @property
    def on(self) -> bool:
        """Say whether anything is watched at all."""
        return self.path is not None


def path_of(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the file is expected; None where alerts are switched off."""
    named = environ.get(VARIABLE)
    if named == OFF:
        return None
    return Path(named or "~/.config/stepscope/alerts.toml").expanduser()


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the file, if there is one; raises nothing."""
    path = _or_none(lambda: path_of(environ))
    if path is None:
        return Settings()
    try:
        given = tomllib.loads(_text_of(path))
    except FileNotFoundError:
        problems = (f"{path}: there is no such file. Correct {VARIABLE}, or make the file.",)
        return Settings(path=path, problems=problems if environ.get(VARIABLE) else ())
    except OSError as error:
        return _refused(path, f"cannot be read ({error.strerror or error}). Make it readable.")
    except (Wrong, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        what = (
            error if isinstance(error, Wrong) else f"is no valid TOML ({_line(error)}). Repair it."
        )
        return _refused(path, str(what))
    return _checked(path, given)


def _or_none(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except RuntimeError:  # a user without a home folder
        return None


def _refused(path: Path, why: str) -> Settings:
    text = f"{path}: {why} Until then only the default rules count, and nobody is told."
    return Settings(path=path, found=True, problems=(text,))


def _text_of(path: Path) -> str:
    """Return what the file holds. Raises OSError, UnicodeDecodeError, and Wrong for a file that
    others may write."""
    # A named pipe in its place must not hang the training.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise Wrong("is no regular file. Put the rules into a file of their own.")
        if state.st_uid not in (os.geteuid(), 0):
            raise Wrong(
                f"belongs to another user (number {state.st_uid}), who could have any command run "
                "as you. Copy it."
            )
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Wrong(
                f"can be written by others (mode {stat.S_IMODE(state.st_mode):03o}), who could "
                f"have any command run as you. Run: chmod go-w '{path}'."
            )
        data = opened.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise Wrong(f"is larger than {SIZE_LIMIT // 1024} KiB. Keep the rules that you need.")
    return data.decode()


def _checked(path: Path, given: Mapping[str, Any]) -> Settings:
    """Take over what is right, and note what is not."""
    problems: list[str] = []

    def tried(check: Callable[..., T], *args: Any) -> T | None:
        try:
            return check(*args)
        except Wrong as error:
            problems.append(f"{path}: {error}")
            return None

    for name in sorted(given.keys() - {"rules", "command", "webhook"}):
        known = "Tables are rules, command and webhook."
        problems.append(f"{path}: {ascii(name)[:60]}: is no table here. {known}")
    rules = {rule.name: rule for rule in DEFAULTS}
    listed = given.get("rules", {})
    if not isinstance(listed, dict):
        problems.append(f"{path}: rules: must be tables, got another value. Write [rules.NAME].")
        listed = {}
    for name, table in list(listed.items())[: checks.RULES_LIMIT]:
        rule = tried(checks.rule, name, table)
        if rule is not None:
            rules[name] = rule
    if len(listed) > checks.RULES_LIMIT:
        problems.append(
            f"{path}: rules: must be at most {checks.RULES_LIMIT}, got {len(listed)}. "
            "Those beyond are left out."
        )
    return Settings(
        rules=tuple(rules.values()),
        command=tried(channels.command, given["command"]) if "command" in given else None,
        webhook=tried(channels.webhook, given["webhook"]) if "webhook" in given else None,
        path=path,
        found=True,
        problems=tuple(problems),
    )


def _line(error: Exception) -> str:
    """Return what is wrong, without what the file holds."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return str(error)[:120]
    return type(error).__name__
