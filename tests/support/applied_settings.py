"""Settings applied to the code of a test, and their entries in run.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepscope.settings import parse
from stepscope.settings.autocast import Bf16
from stepscope.watch.hooks.settings import SettingHooks
from tests.support.fake_live import FakeLive
from tests.support.installed_hooks import installed


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

    def state(self, name: str) -> str:
        return str(self[name]["state"])

    def text(self, name: str) -> str:
        return str(self[name]["text"])

    def states(self) -> dict[str, str]:
        return {setting.name: self.state(setting.name) for setting in self.hooks.settings}


RESTORE: dict[str, Callable[[], None]] = {
    "tf32": lambda: torch.set_float32_matmul_precision("highest"),
    "cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
}


@contextmanager
def applied(words: str) -> Iterator[Applied]:
    """Apply the settings until the end of the block; torch is restored then."""
    found = Applied(words)
    with installed(found.live, found.hooks):
        try:
            yield found
        finally:
            for setting in found.hooks.settings:
                if isinstance(setting, Bf16):
                    setting.end_pass()
                if setting.places and setting.name in RESTORE:
                    RESTORE[setting.name]()
