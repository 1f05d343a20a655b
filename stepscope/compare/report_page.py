"""The HTML of a report: every text is scrubbed, cut and escaped here. Pure.

Charts are inline SVG with the colors of the style sheet, so they follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np

from stepscope.common.formatting import printable, terminal_text
from stepscope.lab.folder import SweepError
from stepscope.store import StoreError
from stepscope.store.blocks import Floats

MAX_TEXT = 600  # characters of a cell
MAX_BLOCK = 20_000  # characters of a log or stack
_STYLE = """
:root{color-scheme:light dark;--ink:light-dark(#1b1f24,#e8ebef);--back:light-dark(#fff,#12161c);
--soft:light-dark(#565e68,#a9b2bd);--rule:light-dark(#d5dae0,#3a424d);
--c0:light-dark(#1f5fbf,#7ab0ff)}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h2{border-bottom:1px solid var(--rule);margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;
padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--rule);font-variant-numeric:tabular-nums}
th[scope=col]{overflow-wrap:normal}th[scope=row]{min-width:7rem}td{min-width:4.6rem}
.wide{overflow-x:auto}.wide table{overflow-wrap:normal;min-width:40rem}
pre{white-space:pre-wrap;border:1px solid var(--rule);padding:.6rem;font-size:12px}
figure{margin:1rem 0;break-inside:avoid}figcaption{font-weight:600}
figure>svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);font-size:12px}
.note{color:var(--soft)}.verdict{border-left:4px solid var(--c0);padding-left:.8rem}
.grid{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}.c0{stroke:var(--c0)}
.c1{stroke:light-dark(#b04a00,#ffa057);stroke-dasharray:7 3}
.c2{stroke:light-dark(#1a7a3c,#6cd48d);stroke-dasharray:2 3}
.c3{stroke:light-dark(#8a2be2,#c9a2ff);stroke-dasharray:9 3 2 3}
.c4{stroke:light-dark(#a8005c,#ff8ec4)}.c5{stroke:light-dark(#00727a,#63d6de);stroke-dasharray:4 4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:.2rem 0}
.key{width:24px;height:8px;margin-right:.4rem;vertical-align:middle}
@media(max-width:600px){figure:has(.legend)>svg text{font-size:17px}}
@media print{:root{color-scheme:light}body{max-width:none;padding:0}h2,h3{break-after:avoid}
tr{break-inside:avoid}.wide{overflow:visible}.wide table{min-width:0;font-size:10px}}
"""


class ReportError(Exception):
    """The report cannot be written; the message has the reason and the fix."""


@contextmanager
def untrusted_content() -> Iterator[None]:
    """Raise ReportError for recorded content that cannot be read or has an unexpected form."""
    try:
        yield
    except (StoreError, SweepError, OSError) as error:
        raise ReportError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"the recorded content is incomplete or damaged ({type(error).__name__}: {error})"
        raise ReportError(f"report: {text}. Check the JSON files in its folder.") from error


class Report:
    """A page in the making; `scrub` is applied to every recorded text."""

    def __init__(self, title: str, scrub: Callable[[str], str] = str) -> None:
        self.title, self.scrub = title, scrub
        self.parts: list[str] = []

    def heading(self, title: str, level: int = 3) -> None:
        """Add a heading; the caller scrubs recorded text in it, so that fixed titles stay."""
        self.parts.append(f"<h{level}>{_html(title)}</h{level}>")

    def paragraph(self, value: str | None, kind: str = "") -> None:
        """Add a sentence with a class of the style sheet."""
        if value:
            self.parts.append(f'<p class="{kind}">{_html(self.scrub(value), 4000)}</p>')

    def block(self, value: str, title: str) -> None:
        """Add text of several lines with a heading, the end of a long one; nothing for none."""
        lines = self.scrub(terminal_text(value).strip()).split("\n")
        kept = "\n".join(map(printable, lines))[-MAX_BLOCK:]
        if kept:
            self.heading(title)
            self.parts.append(f"<pre>{escape(kept)}</pre>")

    def table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table with a heading; nothing without rows."""
        body = ""
        for row in rows:
            # A row is scrubbed as one text: its name shows that a value is a version. It is cut
            # afterwards: half a name would not be found.
            texts = ("n/a" if cell is None else str(cell)[:MAX_BLOCK] for cell in row)
            cells = [" ".join(text.splitlines()) for text in texts]
            first, *others = map(_html, self.scrub("\n".join(cells)).split("\n"))
            body += f'<tr><th scope="row">{first}</th>'
            body += "".join(f"<td>{cell}</td>" for cell in others) + "</tr>"
        if not body:
            return
        self.heading(title)
        head = "".join(f'<th scope="col">{_html(self.scrub(name))}</th>' for name in headings)
        wide = f' class="wide" tabindex="0" role="region" aria-label="{_html(title)}"'
        self.parts.append(
            f"<div{wide if len(headings) > 4 else ''}><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def html(self) -> str:
        """Return the page."""
        name = _html(self.scrub(self.title))
        return (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">"
            f"<title>{name}</title><style>{_STYLE}</style></head>"
            f"<body><main><h1>{name}</h1>{''.join(self.parts)}</main></body></html>\n"
        )


def _html(text: str, limit: int = MAX_TEXT) -> str:
    return escape(printable(text if len(text) <= limit else f"{text[: limit - 1]}…"))


WIDTH = 720
HEIGHT = 230
LEFT = 64
RIGHT = 24
TOP = 12
BOTTOM = 40
COLORS = 6  # classes c0 to c5
MAX_VALUE = 1e300  # the range of two larger values is not finite
Line = tuple[str, Floats, Floats]  # Label, and finite x and y of one length, at least 1.


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


def line_chart(title: str, x_label: str, lines: Sequence[Line]) -> str:
    """Return a figure; "" without lines."""
    if not lines:
        return ""
    x0, x1 = _range([x for _, x, _ in lines])
    y0, y1 = _range([[0.0], *(y for _, _, y in lines)])
    parts: list[str] = []
    keys = ""
    for value in ticks(y0, y1):
        y = _at(value, y0, y1, HEIGHT - BOTTOM, TOP)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(value), "end"))
    for value in ticks(x0, x1, 8):
        x = _at(value, x0, x1, LEFT, WIDTH - RIGHT)
        parts.append(_text(x, HEIGHT - BOTTOM + 16, _number(value)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label))
    for number, (label, xs, ys) in enumerate(lines):
        across = _at(xs, x0, x1, LEFT, WIDTH - RIGHT)
        down = _at(ys, y0, y1, HEIGHT - BOTTOM, TOP)
        points = [f"{x:.1f} {y:.1f}" for x, y in zip(across, down, strict=True)]
        color = f"line c{number % COLORS}"
        # Without length, a single point is drawn as a dot: its ends are round.
        parts.append(f'<path class="{color}" d="M{points[0]}L{"L".join(points[1:] or points)}"/>')
        key = f'<svg class="key" viewBox="0 0 24 8" aria-hidden="true"><path class="{color}"'
        keys += f'<li>{key} d="M1 4H23"/></svg>{escape(label)}</li>'
    name = escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg><ul class="legend">{keys}</ul></figure>'
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
