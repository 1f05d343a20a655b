"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from stepscope.cli import CommandError

T = TypeVar("T")


def add_json(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=help_text)


def add_output(parser: argparse.ArgumentParser, help_text: str, *, required: bool = False) -> None:
    """Add `--output`, a path."""
    parser.add_argument(
        "-o", "--output", type=Path, required=required, metavar="FILE", help=help_text
    )


def cannot_write(output: Path, error: OSError) -> CommandError:
    """Return the error for an `--output` that cannot be written."""
    text = f"--output: cannot be written ({error.strerror or error}), got {output}."
    return CommandError(text)


def script_parser(name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser for the options that precede a script."""
    found = argparse.ArgumentParser(
        prog=f"stepscope {name}",
        usage=f"stepscope {name} [options] (script.py | -m module) [arguments]",
        description=about,
        epilog="\n  ".join(("examples:", *examples)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("-m", dest="module", action="store_true", help="run a module")
    return found


def number_type(low: float, high: float, kind: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse type for numbers from `low` to `high`."""

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:  # type: ignore[operator]
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:g}, got {text[:60]}.")
        return value

    return parse
