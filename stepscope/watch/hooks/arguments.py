"""Record the arguments that the script parses with argparse as its config, without secrets."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from stepscope.common.secrets import is_secret
from stepscope.watch.hooks.patching import Function, HookGuard, replace
from stepscope.watch.hooks.state import HookState

MAX_VALUES = 256
MAX_TEXT = 200  # characters of a value


def attach(state: HookState) -> None:
    """Wrap `ArgumentParser.parse_known_args`, which `parse_args` calls."""
    guard = HookGuard("config of the script's arguments")

    def make(original: Function) -> Function:
        def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
            found = original(self, args, namespace)
            # Other lists are those of subparsers, or of libraries.
            if args is None or args == sys.argv[1:]:
                guard.call(_record, state, found[0])
            return found

        return parse_known_args

    replace(argparse.ArgumentParser, "parse_known_args", make, traced=False)


def _record(state: HookState, namespace: Any) -> None:
    found = {name: _recordable(name, value) for name, value in vars(namespace).items()}
    values = {name: value for name, value in found.items() if value is not None}
    config = dict(state.recorder.run_json["config"]) | values
    state.recorder.describe(config=dict(list(config.items())[:MAX_VALUES]))


def _recordable(name: str, value: Any) -> bool | float | str | None:
    """Return a number or short text; None for other values and for a secret."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, bool | int | float | str) or len(str(value)) > MAX_TEXT:
        return None
    return None if is_secret(name, value) else value
