"""Settings that make a script faster without a change of its code.

`parse` reads the words of `stepscope watch --with`; `stepscope.watch` applies the settings at its
hooks. Each `Setting` checks the live script, shows evidence that it took effect, and has the lines
of code that do the same by hand. docs/watch.md lists all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stepscope.settings import autocast, checkpoint, loader, model, optimizer, process
from stepscope.settings.setting import Setting, SettingError

__all__ = ["SETTINGS", "Setting", "SettingError", "parse"]

SETTINGS: Mapping[str, type[Setting]] = {
    kind.name: kind
    for kind in (
        process.Tf32,
        process.CudnnBenchmark,
        model.Compile,  # innermost: what the next two add to a call is not compiled
        checkpoint.Checkpoint,  # refused for a compiled model; before the hooks of autocast
        model.ChannelsLast,
        autocast.Bf16,
        optimizer.Fused,
        loader.NumWorkers,  # before the settings that need workers
        loader.PinMemory,
        loader.PersistentWorkers,
        loader.PrefetchFactor,
        loader.NonBlocking,
        process.Threads,
    )
}
"""All settings by name, in the order in which they are applied at one moment."""


def parse(words: Iterable[str]) -> list[Setting]:
    """Return the settings of words such as "tf32 num_workers=4". Raises SettingError."""
    given: dict[str, Setting] = {}
    for word in " ".join(words).split():
        name, equals, value = word.partition("=")
        if name not in SETTINGS:
            raise SettingError(f"unknown setting {name!r:.80}. Use {', '.join(SETTINGS)}.")
        if name in given:
            raise SettingError(f"{name} is given twice. Remove one.")
        given[name] = SETTINGS[name](value if equals else None)
    return [given[name] for name in SETTINGS if name in given]
