"""Line charts as inline SVG. Pure.

Colors are classes of the page's style sheet, so that a chart follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from stepscope.store.blocks import Floats

WIDTH, HEIGHT, RIGHT, TOP, BOTTOM = 720, 230, 24, 12, 40
COLORS = 6  # classes c0 to c5
MAX_VALUE = 1e300  # the range of two larger values is not finite
Line = tuple[str, Floats, Floats]
"""Label, and finite x and y of one length, at least 1."""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within [low, high]; `low` < `high`.

    >>> ticks(0, 9.3), ticks(-0.2, 0.31)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [-0.2, -0.1, 0.0, 0.1, 0.2, 0.3])
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.6g}") for number in range(first, last + 1)]


def line_chart(
    title: str, x_label: str, lines: Sequence[Line], rows: Mapping[float, str] | None = None
) -> str:
    """Return a figure with axes and legend; "" without lines.

    `rows` are texts at values of y instead of numbers; then all lines have one color.
    """
    if not lines:
        return ""
    left, height = (64, HEIGHT) if rows is None else (210, 60 + 26 * len(rows))
    x0, x1 = _range([x for _, x, _ in lines])
    y0, y1 = _range([[0.0], *(y for _, _, y in lines)])
    parts, keys = [], ""
    for value, text in rows.items() if rows else ((y, _number(y)) for y in ticks(y0, y1)):
        y = _at(value, y0, y1, height - BOTTOM, TOP)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(left - 6, y + 4, text if len(text) < 30 else f"{text[:28]}…", "end"))
    for value in ticks(x0, x1, 8):
        x = _at(value, x0, x1, left, WIDTH - RIGHT)
        parts.append(_text(x, height - BOTTOM + 16, _number(value)))
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 6, x_label))
    for number, (label, xs, ys) in enumerate(lines):
        across = _at(xs, x0, x1, left, WIDTH - RIGHT)
        down = _at(ys, y0, y1, height - BOTTOM, TOP)
        points = [f"{x:.1f} {y:.1f}" for x, y in zip(across, down, strict=True)]
        name = f"line c{0 if rows else number % COLORS}"
        # Without length, a single point is drawn as a dot: its ends are round.
        parts.append(f'<path class="{name}" d="M{points[0]}L{"L".join(points[1:] or points)}"/>')
        key = f'<svg class="key" viewBox="0 0 24 8" aria-hidden="true"><path class="{name}"'
        keys += f'<li>{key} d="M1 4H23"/></svg>{escape(label)}</li>'
    name, legend = escape(title), "" if rows else f'<ul class="legend">{keys}</ul>'
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg>{legend}</figure>'
    )


def _at(value: Any, low: float, high: float, first: float, last: float) -> Any:
    """Return the coordinate of a number, or of each number of an array."""
    return first + (np.clip(value, low, high) - low) / (high - low) * (last - first)


def _range(arrays: Sequence[Any]) -> tuple[float, float]:
    values = np.clip(np.concatenate(arrays), -MAX_VALUE, MAX_VALUE)
    low, high = float(values.min()), float(values.max())
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high), 1e-9) else (low, low + 1)


def _number(value: float) -> str:
    is_plain = not value or 1e-3 <= abs(value) < 1e7
    return f"{value:,.6g}" if is_plain else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
