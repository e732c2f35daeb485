"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable


def table(headings: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table; "|" in cells is escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
