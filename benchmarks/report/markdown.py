"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(headings: list[str], rows: Iterable[list[str]]) -> str:
    """A heading and a line for each row; a | in a cell stays in it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
