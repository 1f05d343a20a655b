"""Settings applied to the code of a test, and their entries in run.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.settings import parse
from stepscope.watch import hooks
from stepscope.watch.hooks.settings import SettingHooks
from tests.support.fake_live import FakeLive


class Applied:
    """The settings of one script, and their entries in run.json."""

    def __init__(self, words: str) -> None:
        self.live = FakeLive()
        self.hooks = SettingHooks(
            parse([words]), lambda found: self.live.recorder.describe(settings=found)
        )

    def __getitem__(self, name: str) -> dict[str, Any]:
        self.hooks.end()
        entries = self.live.recorder.run_json["settings"]
        return next(entry for entry in entries if entry["name"] == name)

    def states(self) -> dict[str, str]:
        return {setting.name: self[setting.name]["state"] for setting in self.hooks.settings}


@contextmanager
def applied(words: str) -> Iterator[Applied]:
    """Apply the settings until the end of the block; torch is restored then."""
    found = Applied(words)
    attached = hooks.install(found.live, found.hooks)  # type: ignore[arg-type]
    try:
        yield found
    finally:
        attached.remove()
