"""Calls of a function in a process of its own, also under another Python.

    python -m benchmarks.child MODULE:FUNCTION ARGUMENTS

MODULE is one of this folder. The arguments are a JSON list; the last line of stdout is the result
as JSON. A measurement in the function thus begins after the imports of its module.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import environment, last_line


class ChildError(Exception):
    """A child process failed; the message is the last line of its output."""


def child_command(python: Path, function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the command that calls a function of this folder with these arguments."""
    # Not `__module__`, which is __main__ in a benchmark that was started by its name.
    module = Path(inspect.getfile(function)).stem
    target = f"{module}:{function.__name__}"
    return [str(python), "-m", "benchmarks.child", target, json.dumps(arguments)]


def call(
    python: Path,
    function: Callable[..., Any],
    *arguments: Any,
    home: Path,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Return the result of a function that runs in a child process, in the folder `home`.

    Raises ChildError if the child fails or takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            child_command(python, function, *arguments),
            cwd=home,
            env=environment(home) | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no end in {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ChildError(last_line(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Call the function and print its result."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    result = function(*json.loads(sys.argv[2]))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
