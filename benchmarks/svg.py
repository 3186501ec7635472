"""Pictures as plain SVG: curves of distributions over a logarithmic axis, lines, and groups of bars.

Made for `benchmarks.simulate`, `benchmarks.swap` and `benchmarks.growth`, which must draw where nothing but pagemill is installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_WIDTH, _HEIGHT = 420, 300  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 30, 46


class Panel:
    """One set of axes at a place in the picture; `x` and `y` map values to points."""

    def __init__(self, title: str, x_name: str, y_name: str) -> None:
        self._parts: list[str] = []
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        self._parts.append(
            f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" '
            'stroke="#888"/>'
        )
        self._text(_WIDTH / 2, 18, title, "middle", 14)
        self._text(_LEFT + width / 2, _HEIGHT - 8, x_name, "middle")
        middle = _TOP + height / 2
        self._parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
            f"{escape(y_name)}</text>"
        )

    def curves(self, values: Mapping[str, Sequence[float]]) -> None:
        """Draw the share of values up to each x, a curve a name."""
        rows = {name: sorted(row) for name, row in values.items() if row}
        least = max(1e-3, min((row[0] for row in rows.values()), default=1e-3))
        most = max(10 * least, max((row[-1] for row in rows.values()), default=1.0))
        low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))

        def x(value: float) -> float:
            return _across((math.log10(max(value, 10.0**low)) - low) / (high - low))

        for power in range(low, high + 1):
            self._tick_x(x(10.0**power), f"{10.0**power:g}")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            self._tick_y(_up(share), f"{share:g}")
        for name, colour in zip(values, COLOURS, strict=False):
            row = rows.get(name, [])
            # As many points as can be seen.
            picked = range(0, len(row), max(1, len(row) // 400))
            points = " ".join(
                f"{x(row[i]):.1f},{_up((i + 1) / len(row)):.1f}" for i in (*picked, len(row) - 1)
            )
            self._parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')

    def bars(self, values: Mapping[str, Mapping[int, float]]) -> None:
        """Draw a bar a number and name, in groups by number."""
        numbers = sorted({number for row in values.values() for number in row})
        most = max((v for row in values.values() for v in row.values()), default=0.0) or 1.0
        group = 1 / max(1, len(numbers))
        width = 0.8 * group / max(1, len(values))
        for at, number in enumerate(numbers):
            self._tick_x(_across((at + 0.5) * group), str(number))
            for place, (name, colour) in enumerate(zip(values, COLOURS, strict=False)):
                share = values[name].get(number, 0.0) / most
                left = _across((at + 0.1) * group + place * width)
                across = _across(width) - _across(0)
                self._parts.append(
                    f'<rect x="{left:.1f}" y="{_up(share):.1f}" width="{across:.1f}" '
                    f'height="{_up(0) - _up(share):.1f}" fill="{colour}"/>'
                )
        for share in (0.0, 0.5, 1.0):
            self._tick_y(_up(share), f"{most * share:.3g}")

    def lines(self, values: Mapping[str, Mapping[int, float]]) -> None:
        """Draw y over x, both on logarithmic axes, a line a name."""
        xs = sorted({x for row in values.values() for x in row})
        ys = [y for row in values.values() for y in row.values()]
        left, right = math.log10(xs[0]), math.log10(max(xs[-1], 2 * xs[0]))
        low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
        high = max(high, low + 1)
        for x in xs:
            self._tick_x(_across((math.log10(x) - left) / (right - left)), str(x))
        for power in range(low, high + 1):
            self._tick_y(_up((power - low) / (high - low)), f"{10.0**power:g}")
        for (_, row), colour in zip(values.items(), COLOURS, strict=False):
            points = " ".join(
                f"{_across((math.log10(x) - left) / (right - left)):.1f},"
                f"{_up((math.log10(y) - low) / (high - low)):.1f}"
                for x, y in sorted(row.items())
            )
            self._parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')

    def legend(self, names: Sequence[str]) -> None:
        """Say which colour is whose."""
        for at, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
            y = _TOP + 16 + 16 * at
            self._parts.append(
                f'<rect x="{_LEFT + 8}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
            )
            self._text(_LEFT + 22, y, name, "start")

    def markup(self, left: float) -> str:
        """Return the panel, moved to the right by `left`."""
        return f'<g transform="translate({left} 0)">{"".join(self._parts)}</g>'

    def _tick_x(self, x: float, text: str) -> None:
        self._text(x, _HEIGHT - _BOTTOM + 16, text, "middle")

    def _tick_y(self, y: float, text: str) -> None:
        self._text(_LEFT - 5, y + 4, text, "end")
        self._parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )

    def _text(self, x: float, y: float, text: str, anchor: str, size: int = 11) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(text)}</text>"
        )


def picture(panels: Sequence[Panel]) -> str:
    """Return panels side by side as one SVG document."""
    width = _WIDTH * len(panels)
    body = "\n".join(panel.markup(_WIDTH * at) for at, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
