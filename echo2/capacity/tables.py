"""Figures and tables as text, for plans.

Invariant: what is shown is rounded, never what is computed with.
"""

from __future__ import annotations

from collections.abc import Iterable


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """The rows under their header, columns aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def number(value: float) -> str:
    """Four digits, thousands in full."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{round(value, 9) + 0.0:.4g}"


def money(usd: float) -> str:
    """Dollars to the cent; of what is less than one, four digits.

    >>> money(1234.5), money(0.0), money(0.0042171)
    ('1,234.50', '0.00', '0.004217')
    """
    return number(usd) if 0 < abs(usd) < 1 else f"{usd:,.2f}"


def quantity(value: float, unit: str) -> str:
    """A number and its unit."""
    return f"{number(value)} {'step' if unit == 'steps' and value == 1 else unit}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "worker"), counted(2, "worker"), counted(0, "worker")
    ('1 worker', '2 workers', '0 workers')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{number(100 * share)} %"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 60:
        return quantity(seconds, "s")
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min"
