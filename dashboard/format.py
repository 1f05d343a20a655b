"""Text of the page, escaped for Markdown, and its small elements."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import streamlit as st


def escape_markdown(text: str) -> str:
    """Return untrusted text, such as names and paths, escaped for Markdown."""
    return re.sub(r"([\\`*_\[\]<>$:~#|!])", r"\\\1", text)


def code_between_backticks(text: str) -> str:
    """Return text escaped for Markdown, except commands between backticks.

    >>> code_between_backticks("Write *.csv with `make *.csv`.")
    'Write \\\\*.csv with `make *.csv`.'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape_markdown(text)
    return "`".join(escape_markdown(p) if i % 2 == 0 else p for i, p in enumerate(parts))


def named_reason(name: str, reason: str) -> str:
    """Return a reason that begins with the name of its subject.

    >>> named_reason("tf32", "a GPU is needed"), named_reason("fp16 AMP", "fp16 AMP needs CUDA")
    ('tf32: a GPU is needed', 'fp16 AMP needs CUDA')
    """
    return reason if reason.casefold().startswith(name.casefold()) else f"{name}: {reason}"


def note(icon: str, text: str) -> None:
    """Draw a sentence of Markdown in small print with a Material icon."""
    st.caption(f":material/{icon}: {text}")


def pick(
    label: str, options: Collection[Any], key: str, about: str, place: Any = st, **more: Any
) -> Any:
    """Draw a select box of values, or of a mapping from values to labels; return the value."""
    if isinstance(options, Mapping):
        more["format_func"] = options.__getitem__
    return place.selectbox(label, list(options), key=key, help=about, **more)


def button(
    label: str, icon: str, key: str, about: str, refused: str | None = None, **more: Any
) -> bool:
    """Draw a button with a Material icon; `refused` disables it and is its tooltip."""
    more |= {"icon": f":material/{icon}:", "help": refused or about}
    return st.button(label, key=key, disabled=refused is not None, **more)
