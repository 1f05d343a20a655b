"""Text for the page."""

from __future__ import annotations

import re


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is: names and paths come from others."""
    return re.sub(r"([\\`*_\[\]<>$:~#|!])", r"\\\1", text)
