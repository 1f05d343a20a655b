"""Text for the page."""

from __future__ import annotations

import re


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is: names and paths come from others."""
    return re.sub(r"([\\`*_\[\]<>$:~#|!])", r"\\\1", text)


def code_between_backticks(text: str) -> str:
    """Return text that Markdown shows as it is, but for commands between backticks: as code.

    >>> code_between_backticks("Write *.csv with `make *.csv`.")
    'Write \\\\*.csv with `make *.csv`.'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape_markdown(text)
    return "`".join(escape_markdown(p) if i % 2 == 0 else p for i, p in enumerate(parts))


def named_reason(name: str, reason: str) -> str:
    """Return a reason with the name of what it is about before it, if it does not begin with it.

    >>> named_reason("tf32", "a GPU is needed"), named_reason("fp16 AMP", "fp16 AMP needs CUDA")
    ('tf32: a GPU is needed', 'fp16 AMP needs CUDA')
    """
    return reason if reason.casefold().startswith(name.casefold()) else f"{name}: {reason}"
