"""Settings sections: one field is a flag, a YAML key, a line of --help and of settings.json."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import Field, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError, bad_setting

# Settings in which ~ is expanded; add new path settings here.
PATHS = ("output_dir", "log_dir", "model_name", "tokenizer_name")
AUTO = "auto"  # value of settings that a run chooses at its start
TYPE_NAMES = {"int": "a whole number", "float": "a number", "str": "text"}
BOUNDS = {
    "minimum": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "maximum": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


# Effect of a setting on results. step: speed, memory or numerics of a step. learning: the trained model, at
# the same cost per step. logging: recorded metrics only. nothing: no results.
Effect = Literal["step", "learning", "logging", "nothing"]


class Setting(NamedTuple):
    """One field of a section."""

    section: str
    field: Field
    type: Any  # resolved annotation, such as Literal["a", "b"] or int | None


def setting(
    default: Any, help: str, *, resumable: bool = False, affects: Effect | None = None, **bounds: float
) -> Any:
    """Declare a field of a `Section`; `bounds` are named as in BOUNDS.

    A resumable setting may change when a run is resumed. `affects` overrides the section's effect, by which
    runs are compared.
    """
    metadata = {"help": help, "resumable": resumable, "affects": affects, "bounds": bounds}
    return field(default=default, metadata=metadata)


resumable = partial(setting, resumable=True)


class Section:
    """Base of a settings section. UserError for a value out of its field's bounds."""

    affects: ClassVar[Effect] = "step"

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that were given, with those that follow from them."""
        return values

    def __post_init__(self) -> None:
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), int | float):
                check_bounds(f.name, value, f.metadata["bounds"])


def check_bounds(name: str, value: float, bounds: dict[str, float]) -> None:
    """Raise UserError for a number out of `bounds`, which are named as in BOUNDS."""
    for bound, limit in bounds.items():
        holds, words = BOUNDS[bound]
        if not holds(value, limit):
            raise bad_setting(f"must be {words} {limit}", **{name: value})


def nearest(name: Any, candidates: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the candidate of the initials (lr), start or closest spelling."""
    typed = str(name).lower()
    by_spelling = {candidate.lower(): candidate for candidate in candidates}
    initials = {"".join(word[:1] for word in c.lstrip("-").split("_")): c for c in reversed(by_spelling)}
    close = [initials[short]] if (short := typed.lstrip("-")) in initials else []
    close += [candidate for candidate in by_spelling if short and candidate.startswith(typed)]
    close += difflib.get_close_matches(typed, by_spelling, n=1, cutoff=0.7)
    return f"; did you mean {by_spelling[close[0]]!r}?" if close else ""


def matches(pattern: str, name: str) -> bool:
    """True if consecutive dot-separated parts of `name` match the pattern."""
    patterns, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(patterns) + 1)
    return any(all(map(fnmatchcase, parts[start:], patterns)) for start in starts)


def lookup(name: str, settings: dict[str, Setting]) -> Setting:
    """Return the setting called `name`; UserError with the nearest name if there is none."""
    if name not in settings:
        reason = f"unknown setting {name!r}{nearest(name, settings)}"
        raise UserError(reason, flags=[name], exit_code=EXIT_BAD_SETTING)
    return settings[name]


def split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split single values off a type: int | Literal["auto"] | None becomes int and ("auto", None)."""
    if get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, ()
    kind, *alternatives = get_args(hint)
    return kind, tuple(value for literal in alternatives for value in get_args(literal) or (None,))


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert the value of a flag or YAML key to its field's type. UserError if it is invalid."""
    hint, single_values = split_hint(hint)
    optional = None in single_values

    def wrong(reason: str) -> UserError:
        return bad_setting(reason, **{name: str(value)})

    if value is None or (optional and str(value).lower() in ("none", "null")):
        if optional:
            return None
        raise wrong("needs a value")
    if value in single_values:
        return value
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise wrong(f"not one of {', '.join(choices)}{nearest(value, choices)}")
        return value
    if hint is bool:
        if str(value).lower() not in ("true", "false"):
            raise wrong("must be true or false")
        return str(value).lower() == "true"
    try:
        converted = _convert_scalar(value, hint)
    except (ValueError, OverflowError):
        words = [TYPE_NAMES[hint.__name__], *filter(None, single_values)]
        raise wrong(f"must be {' or '.join(words)}") from None
    if hint is float and not math.isfinite(converted):
        raise wrong("must be a finite number")
    if name in PATHS:
        if not converted:  # often an unset variable of a script
            raise wrong("needs a value")
        return os.path.expanduser(converted)  # shells do not expand --x=~/y
    return converted


def _convert_scalar(value: Any, hint: type) -> Any:
    if hint is int and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE]\+?\d+", value):
        value = float(value)  # 1e6 steps
    fraction = hint is int and isinstance(value, float) and not value.is_integer()  # NaN and infinity, too
    if fraction or isinstance(value, bool | list | dict):
        raise ValueError
    return hint(value)
