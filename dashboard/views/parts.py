"""Streamlit elements in the form that several pages have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.format import escape_markdown
from dashboard.run_files import too_large_to_download
from stepscope.common.formatting import printable

OUTPUT_HEIGHT = 320  # px
OUTPUT_LINES = 12  # Lines that fit into that height.


def table(
    rows: Sequence[dict[str, Any]],
    columns: dict[str, Any] | None,
    key: str,
    alt: str,
    **options: Any,
) -> Any:
    """Draw rows as a table; `alt` describes it to screen readers."""
    return st.dataframe(
        rows, column_config=columns, hide_index=True, placeholder="–", key=key, alt=alt, **options
    )


def plot(figure: dict[str, Any], key: str, alt: str | None = None) -> None:
    """Draw a Plotly figure without its buttons."""
    st.plotly_chart(figure, key=key, config={"displayModeBar": False}, alt=alt)


def download(
    label: str,
    make: Callable[[], str | bytes],
    name: str,
    key: str,
    text: str,
    *,
    file: tuple[Path, int] | None = None,
    mime: str | None = None,
) -> None:
    """Draw a button that downloads what `make` returns.

    `file` is the file behind it and its size: a too large one is named instead.
    """
    refused = None if file is None else too_large_to_download(*file)
    if refused is not None:
        st.caption(escape_markdown(printable(refused)), width="content")
        return
    st.download_button(
        label,
        make,
        file_name=name,
        mime=mime,
        icon=":material/download:",
        key=key,
        on_click="ignore",
        help=text,
    )


def start_button(
    label: str, refused: str | None, text: str, place: Any = st, **options: Any
) -> bool:
    """Draw a button, and below it why it is disabled; return True for a press."""
    options = {"type": "primary"} | options
    pressed = place.button(label, disabled=refused is not None, help=refused or text, **options)
    if refused is not None:
        place.caption(f":material/block: {escape_markdown(refused)}")
    return bool(pressed and refused is None)


def output(text: str) -> None:
    """Draw the output of a program; a long one begins at its end."""
    # The box, not the text in it, has the height: only a box can begin at its end.
    height: Any = OUTPUT_HEIGHT if text.count("\n") > OUTPUT_LINES else "content"
    with st.container(height=height, border=False, autoscroll=True):
        st.code(text, language=None, wrap_lines=True)
