"""Small drawings that need no library: bars, a line over the rounds, before and after."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from simulations.results.html import Html, element, joined

WIDTH: Final = 560
HEIGHT: Final = 210
LEFT: Final = 58
RIGHT: Final = 12
TOP: Final = 14
BOTTOM: Final = 30
NUM_STEPS: Final = 4
MOST_DOTS: Final = 30
MOST_LABELS: Final = 10


class Bar(NamedTuple):
    """One line of a bar chart."""

    name: str
    value: float
    shown: str
    is_own: bool = False
    """Whether it is what the page is about."""


def bars(lines: Sequence[Bar], most: float | None = None) -> Html:
    """Return bars one below the other; the longest, or `most`, has the full width."""
    whole = most or max((line.value for line in lines), default=0.0) or 1.0
    stands_out = sum(line.is_own for line in lines) == 1
    return joined(
        _bar(line, max(0.0, min(1.0, line.value / whole)), bold=line.is_own and stands_out)
        for line in lines
    )


def _bar(line: Bar, share: float, *, bold: bool) -> Html:
    width = f"{100 * share:.2f}%"
    kind = "own" if line.is_own else "other"
    drawn = element(
        "svg",
        element("rect", width="100%", height="100%", rx="4", class_="track"),
        element("rect", width=width, height="100%", rx="4", class_=kind),
        aria_hidden="true",
    )
    return element(
        "div",
        element("span", element("b", line.name) if bold else line.name),
        drawn,
        element("span", line.shown, class_="number"),
        class_="bar",
    )


def dumbbell(before: float, after: float, low: float, high: float) -> Html:
    """Return where something was and where it is now, on a scale from low to high."""
    room = (high - low) or 1.0
    start, end = (f"{6 + 88 * (value - low) / room:.1f}%" for value in (before, after))
    return element(
        "svg",
        element("line", x1=start, x2=end, y1="7", y2="7"),
        element("circle", cx=start, cy="7", r="4", class_="other"),
        element("circle", cx=end, cy="7", r="5", class_="own"),
        class_="dumbbell",
        aria_hidden="true",
    )


def curve(
    points: Sequence[tuple[int, float]], levels: Mapping[str, float], *, percent: bool
) -> Html:
    """Return how good something is after each round, beside some levels to compare with."""
    values = [value for _, value in points] + [*levels.values()]
    low, high, step = _scale(min(values), max(values))
    first, last = points[0][0], points[-1][0]

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number - first) / max(1, last - first)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    lines = []
    for count in range(round((high - low) / step) + 1):
        value = low + count * step
        label = f"{100 * value:.3g} %" if percent else f"{value:.3g}"
        lines.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "axis"))
        lines.append(_label(label, LEFT - 6, y(value) + 4, "end"))
    for name, value in levels.items():
        lines.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "level"))
        lines.append(_label(name, WIDTH - RIGHT, y(value) - 4, "end"))
    every = max(1, math.ceil(len(points) / MOST_LABELS))
    lines += [
        _label(str(number), x(number), HEIGHT - 10, "middle") for number, _ in points[::every]
    ]
    path = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in points)
    lines.append(element("polyline", points=path, class_="curve"))
    if len(points) <= MOST_DOTS:
        lines += [
            element("circle", cx=f"{x(n):.1f}", cy=f"{y(v):.1f}", r="3.2", class_="own")
            for n, v in points
        ]
    title = element("title", f"{len(points)} rounds, from {first} to {last}")
    return element(
        "svg", title, *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img"
    )


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Return the ends of an axis and the distance of its lines, in round numbers.

    Examples
    --------
    >>> _scale(0.53, 0.94)
    (0.4, 1.0, 0.2)
    """
    room = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(room / NUM_STEPS))
    step = next(s * power for s in (1, 2, 5, 10) if s * power * NUM_STEPS >= room)
    ends = math.floor(low / step), math.ceil(high / step)
    return round(ends[0] * step, 12), round(max(ends[1], ends[0] + 1) * step, 12), step


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return element("line", **{k: f"{v:.1f}" for k, v in ends.items()}, class_=kind)


def _label(words: str, x: float, y: float, anchor: str) -> Html:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
