"""A line chart with error bars as SVG, written by hand: the tables need no plotting library beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .common import Spread

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 36, 44
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c77d1e", "#555555")
LINE_HEIGHT = 15


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    ticks: Sequence[str],
    series: Mapping[str, Sequence[Spread | None]],
) -> str:
    """One line per entry of ``series`` over evenly spaced ``ticks``; None leaves a point out.

    Raises ValueError where a series has not one value per tick, or there is nothing to draw.
    """
    for name, row in series.items():
        if len(row) != len(ticks):
            raise ValueError(f"{name}: {len(row)} values for {len(ticks)} ticks")
    top = nice_top(max(point.high for row in series.values() for point in row if point is not None))
    parts = [*_frame(title, x_label, y_label), *_grid(ticks, top)]
    for index, (name, row) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += _line(row, top, len(ticks), colour)
        y = TOP + LINE_HEIGHT * (index + 1)
        parts.append(f'<rect x="{LEFT + 10}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y}">{escape(name)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def nice_top(value: float) -> float:
    """The end of an axis that starts at 0 and holds ``value``: 1, 2, 2.5 or 5 times a power of ten."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def _x(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}'
        "</text>",
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(y_label)}</text>",
    ]


def _grid(ticks: Sequence[str], top: float) -> list[str]:
    parts = []
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for index, tick in enumerate(ticks):
        x = _x(index, len(ticks))
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(tick)}</text>'
        )
    return parts


def _line(row: Sequence[Spread | None], top: float, count: int, colour: str) -> list[str]:
    there = [(_x(index, count), point) for index, point in enumerate(row) if point is not None]
    points = " ".join(f"{x:.1f},{_y(point.median, top):.1f}" for x, point in there)
    parts = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, point in there:
        low, high, median = (_y(value, top) for value in (point.low, point.high, point.median))
        parts.append(
            f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
            f'<circle cx="{x:.1f}" cy="{median:.1f}" r="3" fill="{colour}"/>'
        )
    return parts
