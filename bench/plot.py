"""A plot of several small panels as one SVG, without a library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 300, 220, 48, 30, 12, 34
COLOURS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df")


@dataclasses.dataclass(frozen=True)
class Line:
    """Points (x, y) under a name; lines of one colour belong together.

    Attributes:
      dash: "" is drawn through, else an SVG dash pattern.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int = 0
    dash: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]


def svg(panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels in rows of `columns`, each with axes from zero and a legend of its own."""
    rows = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for at, panel in enumerate(panels):
        x, y = at % columns * WIDTH, at // columns * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    places = sorted({x for line in panel.lines for x, _ in line.points})
    top = max((y for line in panel.lines for _, y in line.points), default=1) * 1.1 or 1
    last = max(places, default=1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / last * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM), 1)

    (left, floor), (right, ceiling) = at(0, 0), at(last, top)
    parts = [
        _text(LEFT, 16, panel.title, weight="bold"),
        f'<path d="M{left} {ceiling}V{floor}H{right}" fill="none" stroke="#57606a"/>',
        _text((left + right) / 2, HEIGHT - 6, panel.x, anchor="middle"),
        _text(LEFT - 4, 27, panel.y, anchor="end"),
    ]
    for x in places:
        parts.append(_text(at(x, 0)[0], floor + 12, f"{x:g}", anchor="middle"))
    for part in (0.25, 0.5, 0.75, 1.0):
        value = top / 1.1 * part
        parts.append(_text(left - 4, at(0, value)[1] + 3, f"{value:.3g}", anchor="end"))
    for row, line in enumerate(panel.lines):
        colour = COLOURS[line.colour % len(COLOURS)]
        stroke = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="{line.dash}"'
        points = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        if not line.dash:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points]
        beside = left + 8, TOP + 12 * row + 4
        parts.append(f'<path d="M{beside[0]} {beside[1]}h18" {stroke}/>')
        parts.append(_text(beside[0] + 22, beside[1] + 3, line.name))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="#24292f"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
