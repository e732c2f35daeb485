"""Columns to train on, by --dataset_text_field or by name. Register new column names in KNOWN_COLUMNS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
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
    """Return the column of --dataset_text_field, else the first match in KNOWN_COLUMNS; UserError if none.

    `examples` are rows of the data set.
    """
    kind, fields = named_column(cfg, names, examples) or known_columns(cfg, names)
    if kind == "text":
        shown = f"{fields[0]} (plain text)" + not_used(names, fields)
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


def named_column(cfg: DataConfig, names: list[str], examples: Iterable[Row]) -> tuple[str, tuple] | None:
    """Return (kind, columns) of --dataset_text_field, None without it. UserError if it does not exist."""
    if (field := cfg.dataset_text_field) is None:
        return None
    if field not in names:
        reason = f"no such column in --dataset_name {cfg.dataset_name}; it has {', '.join(names) or 'none'}"
        raise bad_setting(reason, dataset_text_field=field)
    first = next((row[field] for row in examples if row.get(field)), "")
    return "chats" if rows.is_objects(first) else "text", (field,)


def known_columns(cfg: DataConfig, names: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the first entry of KNOWN_COLUMNS whose columns all exist; UserError if there is none."""
    for kind, fields in KNOWN_COLUMNS:
        if set(fields) <= set(names):
            return kind, fields
    raise bad_setting(
        "no chat, prompt/answer or text columns found; rename them to messages, prompt and completion, or "
        f"text (columns: {', '.join(names) or 'none'})",
        dataset_name=cfg.dataset_name,
    )


def shown_system(system: str, columns: list[str]) -> str:
    """Describe the system prompt: that of a row's own columns, else `system`."""
    line = " ".join(system.split())
    default = f'system prompt "{line[:MAX_SHOWN]}{"..." * (len(line) > MAX_SHOWN)}"'
    if columns:
        return f", system prompt of {' or '.join(columns)}" + f", else {default}" * bool(system)
    return f", {default}" if system else ", no system prompt"


def not_used(names: list[str], used: Collection[str]) -> str:
    """Name the columns that are not used."""
    unused = [name for name in names if name not in used]
    return f"; not used: {', '.join(unused)}" if unused else ""
