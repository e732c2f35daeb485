"""Base of a settings section: one field is a flag, a YAML key, a line of --help and of config.json."""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from dataclasses import field, fields
from typing import Any, ClassVar, Literal, get_args, get_origin

from core.errors import bad_setting

PATHS = ("output_dir", "log_dir", "data_cache_dir", "weights_cache_dir", "model_name", "tokenizer_name")


# Effect of a setting on a run: the work of a step (speed, memory, and loss, if only by rounding), what the
# model learns at the same work per step, what is logged and evaluated, or nothing that a result depends on.
Effect = Literal["step", "learning", "logging", "nothing"]


def setting(
    default: Any,
    help: str,
    *,
    resumable: bool = False,
    minimum: int | None = None,
    affects: Effect | None = None,
) -> Any:
    """One field of a `Section`. A resumable setting may change when a run is resumed.

    `affects` overrides the section's effect, by which runs are compared.
    """
    metadata = {"help": help, "resumable": resumable, "minimum": minimum, "affects": affects}
    return field(default=default, metadata=metadata)


def require(condition: bool, flag: str, value: Any, reason: str) -> None:
    """Raise UserError about `--flag value` unless `condition` holds."""
    if not condition:
        raise bad_setting(reason, **{flag: value})


class Section:
    """Base of a settings section. UserError for a value below its field's minimum."""

    affects: ClassVar[Effect] = "step"

    def __post_init__(self) -> None:
        for f in fields(self):
            value, minimum = getattr(self, f.name), f.metadata["minimum"]
            if None not in (value, minimum):
                require(value >= minimum, f.name, value, f"must be at least {minimum}")


def nearest(name: Any, candidates: Any) -> str:
    """A question for an error's end: the candidate with these initials (lr), or the one most alike."""
    name = str(name)
    words = {c: c.lstrip("-").split("_") for c in candidates}
    close = [c for c, found in words.items() if "".join(w[:1] for w in found) == name.lstrip("-") != ""]
    close += difflib.get_close_matches(name, list(words), n=1, cutoff=0.7)  # --model is that near
    return f"; did you mean {close[0]!r}?" if close else ""


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (types.UnionType, typing.Union):
        inner = [a for a in get_args(hint) if a is not type(None)]
        return inner[0], True
    return hint, False


def convert(name: str, value: Any, hint: Any) -> Any:
    """Give a flag's or YAML key's value its field's type (YAML reads 1e-5 as a string)."""
    hint, optional = _strip_optional(hint)
    if name in PATHS and isinstance(value, str):
        value = os.path.expanduser(value)  # which shells do not do after `=`
    if value is None or (optional and isinstance(value, str) and value.lower() in ("none", "null")):
        if optional:
            return None
        raise ValueError(f"--{name} needs a value")
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise ValueError(
                f"--{name} {value}: not one of {', '.join(choices)}{nearest(str(value), choices)}"
            )
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise ValueError(f"--{name} {value}: must be true or false")
    if isinstance(value, bool | list | dict):
        raise ValueError(f"--{name} {value}: must be {_kind(hint)}")
    if hint is int and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE]\+?\d+", value):
        value = float(value)  # 1e6 steps
    if hint is int and isinstance(value, float) and not value.is_integer():  # NaN and infinity are not, too
        raise ValueError(f"--{name} {value}: must be a whole number")
    try:
        converted = hint(value)
    except (ValueError, OverflowError):
        raise ValueError(f"--{name} {value}: must be {_kind(hint)}") from None
    if hint is float and not math.isfinite(converted):
        raise ValueError(f"--{name} {value}: must be a finite number")
    return converted


def _kind(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text"}[hint]
