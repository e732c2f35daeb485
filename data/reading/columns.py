"""Columns to train on, from the settings or by name. Register new column names in KNOWN_COLUMNS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fp8_suite.core.errors import bad_setting
from fp8_suite.data.reading import rows
from fp8_suite.data.reading.rows import TOOLS, Row
from fp8_suite.data.settings import SYSTEM_PROMPT, DataConfig

COLUMN_FLAGS = {  # kind of columns -> flags that name them
    "chats": ("dataset_messages_field",),
    "text": ("dataset_text_field",),
    "pairs": ("dataset_prompt_field", "dataset_completion_field"),
}
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


def choose_columns(cfg: DataConfig, names: list[str]) -> Columns:
    """Return the columns named in the settings, else the first match in KNOWN_COLUMNS; UserError if none."""
    named = named_columns(cfg, names)
    found = named or [(kind, fields) for kind, fields in KNOWN_COLUMNS if set(fields) <= set(names)]
    if not found:
        raise bad_setting(
            "no chat, prompt/answer or text columns found; name them with --dataset_messages_field, "
            "--dataset_text_field, or --dataset_prompt_field and --dataset_completion_field "
            f"(columns: {', '.join(names) or 'none'})",
            dataset_name=cfg.dataset_name,
        )
    kind, fields = found[0]
    if kind == "text":
        shown = f"{fields[0]} (plain text)" + unused_hint(fields, found[1:])
        return Columns(partial(rows.text, *fields), chat=False, system="", shown=shown, tools=False)
    # The default system prompt is about math problems, so other data gets only an explicit one.
    is_math = kind == "pairs" and fields[0] == MATH_PROMPT
    system = cfg.system_prompt if is_math or cfg.system_prompt != SYSTEM_PROMPT else ""
    contexts = CONTEXTS.get(fields[0], ()) if kind == "pairs" and not named else ()
    if kind == "chats":
        to_sample = partial(rows.messages, *fields, system)
    else:
        to_sample = partial(rows.pair, *fields, contexts, system)
    prompt = " and ".join([fields[0], *(name for name in (*contexts, TOOLS) if name in names)])
    shown = " -> ".join([prompt, *fields[1:]]) + " (whole chats)" * (kind == "chats")
    line = " ".join(system.split())
    cut = f"{line[:MAX_SHOWN]}{'...' * (len(line) > MAX_SHOWN)}"
    shown += f', system prompt "{cut}"' if system else ", no system prompt"
    shown += unused_hint((*fields, *contexts), found[1:])
    return Columns(to_sample, chat=True, system=system, shown=shown, tools=TOOLS in names)


def named_columns(cfg: DataConfig, names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the columns named in the settings, or []. UserError if the data set lacks one of them."""
    for kind, flags in COLUMN_FLAGS.items():
        fields = {flag: getattr(cfg, flag) for flag in flags if getattr(cfg, flag) is not None}
        for flag, field in fields.items():
            if field not in names:
                reason = f"no such column in --dataset_name {cfg.dataset_name}"
                raise bad_setting(f"{reason}; it has {', '.join(names) or 'none'}", **{flag: field})
        if fields:
            return [(kind, tuple(fields.values()))]
    return []


def unused_hint(used: tuple[str, ...], others: list[tuple[str, tuple[str, ...]]]) -> str:
    """Return a hint with the flags for the data set's other known columns, or an empty string."""
    flags = [
        " ".join(f"--{flag} {field}" for flag, field in zip(COLUMN_FLAGS[kind], fields, strict=True))
        for kind, fields in others
        if not set(fields) <= set(used)
    ]
    return f"; to use others: {' or '.join(flags)}" if flags else ""
