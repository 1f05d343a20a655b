"""The versions of torch that Stepscope supports."""

from __future__ import annotations

import functools
import logging
import re

log = logging.getLogger(__name__)

OLDEST, NEWEST = (2, 6), (2, 15)
"""README.md and docs/watch.md name the same range; docs/watch.md lists the tests that ran."""
SUPPORTED = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))


def unsupported(version: str) -> str | None:
    """Return a sentence about a torch outside the range; None for a supported or unknown version.

    >>> unsupported("2.15.0+cu130")
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or OLDEST <= tuple(map(int, number.groups())) <= NEWEST:
        return None
    return (
        f"torch {version} is not supported, only {SUPPORTED}: "
        "training is not affected, but metrics may be missing."
    )


@functools.cache
def warn_if_unsupported(version: str) -> None:
    """Log the sentence of `unsupported` once per process."""
    sentence = unsupported(version)
    if sentence is not None:
        log.warning("stepscope: %s", sentence)
