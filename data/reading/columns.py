"""Columns to train on, by --dataset_text_field or by name. Register new column names in KNOWN_COLUMNS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from textwrap import shorten
from typing import NamedTuple

from fp8_suite.core.errors import bad_setting
from fp8_suite.data.reading import rows
from fp8_suite.data.reading.rows import HISTORY, SYSTEM, TEMPLATE_OPTIONS, TOOLS, Row
from fp8_suite.data.settings import SYSTEM_PROMPT, DataConfig

# (kind, column names). The first entry whose columns all exist is used.
KNOWN_COLUMNS = (
    ("chats", ("messages",)),
    ("pairs", ("problem", "generated_solution")),
    ("pairs", ("problem", "solution")),
    ("pairs", ("prompt", "completion")),
    ("pairs", ("prompt", "response")),
    ("pairs", ("instruction", "output")),
    ("pairs", ("instruction", "response")),
    ("pairs", ("question", "answer")),
    ("pairs", ("question", "response")),
    ("pairs", ("query", "response")),
    ("pairs", ("input", "output")),
    ("chats", ("conversations",)),  # after pairs: some data sets store other things under this name
    ("chats", ("conversation",)),
    ("text", ("text",)),
    ("text", ("content",)),
)
CONTEXTS = {"instruction": ("input", "context")}  # prompt column -> columns appended to it
MATH_PROMPT = "problem"  # prompt column with the default system prompt
MAX_SHOWN = 80  # maximum characters of the system prompt in the report


class Columns(NamedTuple):
    to_sample: Callable[[Row], Row]
    chat: bool  # False for plain text, which may be split anywhere
    system: str  # system prompt for chats without one; "" for none
    shown: str  # description for the report
    tools: bool  # True if the data has a column of tools


def choose_columns(cfg: DataConfig, names: list[str], examples: Iterable[Row]) -> Columns:
    """Return the column of --dataset_text_field, else the first match in KNOWN_COLUMNS; UserError if none."""
    kind, fields = find_columns(cfg, names, examples)
    if kind == "text":
        shown = f"{fields[0]} (plain text){not_used(names, fields)}"
        return Columns(partial(rows.text, *fields), chat=False, system="", shown=shown, tools=False)
    # The default system prompt is about math problems, so other data gets only an explicit one.
    is_math = kind == "pairs" and fields[0] == MATH_PROMPT
    system = cfg.system_prompt if is_math or cfg.system_prompt != SYSTEM_PROMPT else ""
    contexts = CONTEXTS.get(fields[0], ()) if kind == "pairs" else ()
    if kind == "chats":
        to_sample = partial(rows.messages, *fields, system)
    else:
        to_sample = partial(rows.pair, *fields, contexts, system)
    beside = (*contexts, *[HISTORY] * (kind == "pairs"), TOOLS, TEMPLATE_OPTIONS)
    prompt = " and ".join([fields[0], *(name for name in beside if name in names)])
    shown = " -> ".join([prompt, *fields[1:]]) + " (whole chats)" * (kind == "chats")
    shown += shown_system(system, [name for name in SYSTEM if name in names])
    shown += not_used(names, (*fields, *beside, *SYSTEM))
    return Columns(to_sample, chat=True, system=system, shown=shown, tools=TOOLS in names)


def find_columns(cfg: DataConfig, names: list[str], examples: Iterable[Row]) -> tuple[str, tuple[str, ...]]:
    """Return the kind and the columns to train on; UserError if there are none."""
    if (field := cfg.dataset_text_field) is not None:
        if field not in names:
            raise bad_setting(f"no such column; the data has {', '.join(names)}", dataset_text_field=field)
        first = next((row[field] for row in examples if row.get(field)), "")
        return "chats" if rows.is_objects(rows.from_json(first)) else "text", (field,)
    for kind, fields in KNOWN_COLUMNS:
        if set(fields) <= set(names):
            return kind, fields
    way_out = "rename them to messages, prompt and completion, or text"
    reason = f"no chat, prompt/answer or text columns among {', '.join(names)}"
    raise bad_setting(f"{reason}; {way_out}", dataset_name=cfg.dataset_name)


def shown_system(system: str, columns: list[str]) -> str:
    """Describe the system prompt: that of a row's own columns, else `system`."""
    default = f'system prompt "{shorten(system, MAX_SHOWN)}"'
    if columns:
        return f", system prompt of {' or '.join(columns)}" + f", else {default}" * bool(system)
    return f", {default}" if system else ", no system prompt"


def not_used(names: list[str], used: Collection[str]) -> str:
    """Name the columns that are not used."""
    unused = [name for name in names if name not in used]
    return f"; not used: {', '.join(unused)}" if unused else ""
