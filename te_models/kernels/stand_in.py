"""Functions of other modules that the suite's own stand in for, and that can be had back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stand_in(owner: Any, name: str, make: Callable[[Any], Any], *, wanted: bool) -> None:
    """`owner.name` becomes what `make` makes of it, which keeps it as `original`; or is itself again."""
    found = getattr(owner, name, None)
    original = getattr(found, "original", None)
    if wanted and not original:
        made = make(found)
        made.original = found
        setattr(owner, name, made)
    elif original and not wanted:
        setattr(owner, name, original)
