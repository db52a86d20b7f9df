"""Small pictures of numbers over time, as SVG within a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

WIDTH: Final = 120
HEIGHT: Final = 28


def sparkline(values: Sequence[float], label: str, css: str = "c1", slots: int = 0) -> Markup:
    """A line with the area below it; the newest value is at the right.

    Args:
        values: The oldest first.
        label: What they are, for people who hear the page.
        css: The class that colours it.
        slots: Places for values; with fewer values the left is empty. 0: as many as there are.
    """
    top = max(values, default=0)
    newest = values[-1] if values else 0
    text = f"{label}: now {newest:,.4g}, at most {top:,.4g}"
    open_svg = Markup(
        '<svg class="spark {}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}">'
    ).format(css, WIDTH, HEIGHT, text)
    if len(values) < 2:
        return open_svg + Markup("</svg>")
    step = WIDTH / (max(slots, len(values)) - 1)
    left = WIDTH - step * (len(values) - 1)
    points = " ".join(
        f"{left + at * step:.1f},{HEIGHT - 2 - (HEIGHT - 4) * value / (top or 1):.1f}"
        for at, value in enumerate(values)
    )
    return open_svg + Markup(
        '<polygon points="{0:.1f},{2} {1} {3},{2}"/><polyline points="{1}"/></svg>'
    ).format(left, points, HEIGHT, WIDTH)
