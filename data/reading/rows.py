"""Convert rows to samples: `{"text": ...}`, or `{"messages": [...]}`, optionally with tools and options.

Conversions keep values of a wrong type; `judge` reports them. Other faults become `{"fault": reason}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from enum import IntEnum
from itertools import dropwhile
from typing import Any

Row = dict[str, Any]

# Columns of a conversation beside its messages, or prompt and answer:
TOOLS = "tools"  # tool definitions
SYSTEM = ("system", "system_prompt")  # system message of a chat without one
HISTORY = "history"  # turns before a prompt
TEMPLATE_OPTIONS = "chat_template_kwargs"  # variables of the chat template
CALLS = "tool_calls"  # message key of tool calls
WEIGHT = "weight"  # message key of OpenAI's chats: 1, or 0 for no loss
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLE_ALIASES = {  # senders of ShareGPT data and its derivatives -> role
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}


def text(field: str, row: Row) -> Row:
    """Return a sample of plain text."""
    return {"text": row.get(field)}


def messages(field: str, system: str, row: Row) -> Row:
    """Return a sample of OpenAI or ShareGPT messages, which may be JSON text, as in CSV."""
    return conversation(from_json(row.get(field)), system, row)


def pair(prompt: str, answer: str, contexts: tuple[str, ...], system: str, row: Row) -> Row:
    """Return a chat from prompt and answer, texts or messages; `contexts` are appended to a text prompt."""
    question, reply, history = as_text(row.get(prompt)), as_text(row.get(answer)), row.get(HISTORY)
    if (earlier := earlier_turns(history)) is None:
        return {"fault": f"its {HISTORY} is not a list of prompts with their answers, or of messages"}
    if isinstance(question, str):
        parts = [part for name in contexts for part in passages(row.get(name))]
        question = "\n\n".join([question, *parts])
    turns = [*earlier, *as_turns("user", question), *as_turns("assistant", reply)]
    return conversation(turns, system, row)


def conversation(turns: Any, system: str, row: Row) -> Row:
    """Return the sample of a row's turns, with its system message, tools and template options.

    `system` is the system message of a row without one. Assistant turns at the start answer no prompt; they
    are dropped if other turns follow, as in FastChat.
    """
    if is_objects(turns):
        turns = [message(turn) for turn in turns]
        turns = list(dropwhile(lambda turn: turn.get("role") == "assistant", turns)) or turns
        system = next((row[name] for name in SYSTEM if row.get(name)), system)
        if system and turns and turns[0].get("role") not in ("system", "developer"):
            turns = [{"role": "system", "content": system}, *turns]
    sample = {"messages": turns}
    if tools := from_json(row.get(TOOLS)):
        sample[TOOLS] = [tools] if isinstance(tools, dict) else tools
    if options := from_json(row.get(TEMPLATE_OPTIONS)):
        sample["options"] = options
    return sample


def earlier_turns(history: Any) -> list[Row] | None:
    """Return the turns of a history: messages, or (prompt, answer) pairs; None if it is neither."""
    history = from_json(history) or []
    if is_objects(history):
        return history
    if not isinstance(history, list) or not all(isinstance(p, list) and len(p) == 2 for p in history):
        return None
    pairs = ((as_turns("user", prompt), as_turns("assistant", answer)) for prompt, answer in history)
    return [turn for question, reply in pairs for turn in (*question, *reply)]


def as_turns(role: str, content: Any) -> list[Row]:
    """Return messages as they are, and any other content as one message."""
    return content if is_objects(content) else [{"role": role, "content": content}]


def message(turn: Row) -> Row:
    """Convert one message to the format that chat templates expect.

    Keys without a value are dropped: in Parquet every message has all keys, and templates test for keys.
    """
    converted = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if "role" not in converted and "from" in converted:
        converted |= {"role": converted.pop("from"), "content": converted.pop("value", None)}
    if isinstance(converted.get("role"), str):
        converted["role"] = ROLE_ALIASES.get(converted["role"], converted["role"])
    parts = converted.get("content")
    if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        converted["content"] = "".join(part["text"] for part in parts)
    if calls := from_json(converted.pop(CALLS, None)):
        converted["content"] = converted.get("content") or ""  # messages with calls may have no content
        calls = [calls] if isinstance(calls, dict) else calls
        converted[CALLS] = list(map(with_parsed_arguments, calls)) if is_objects(calls) else calls
    return converted


def with_parsed_arguments(call: Row) -> Row:
    """Parse a call's arguments: the OpenAI format has a JSON string, templates expect an object."""
    function = call.get("function")
    arguments = from_json(function.get("arguments")) if isinstance(function, dict) else None
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def from_json(value: Any) -> Any:
    """Parse a JSON string; return other values as is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def is_objects(value: Any) -> bool:
    """True for a list of JSON objects, such as messages, tools or calls."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def passages(value: Any) -> list[str]:
    """Return the texts in a context column's value, which may be null, a text or a list."""
    texts = [as_text(item) for item in (value if isinstance(value, list) else [value]) if item is not None]
    return [item for item in texts if item] if all(isinstance(item, str) for item in texts) else []


def as_text(value: Any) -> Any:
    """Convert a finite number to text, since answers may be numbers; return other values as is."""
    is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


def json_line(to_sample: Callable[[Row], Row], row: Row) -> Row:
    """Convert one line of JSON; a blank line becomes an empty sample."""
    if not row["text"].strip():
        return {}
    line = parse_line(row)
    return {"fault": line} if isinstance(line, str) else to_sample(line)


def parse_line(row: Row) -> Row | str:
    """Return the object in a line of JSON, or the reason why the line is invalid."""
    try:
        line = json.loads(row["text"])
    except (ValueError, RecursionError):  # nested too deeply, or an integer that is too long
        return "not valid JSON"
    return line if isinstance(line, dict) else "not a JSON object"


def arrow_row(to_sample: Callable[[Row], Row], row: Row) -> Row:
    """Drop nulls, then convert: Arrow gives all objects of a list the union of their keys."""
    return to_sample(drop_nulls(row))


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


class Status(IntEnum):
    """Status of a row, ordered from best to worst; a row of several samples has its worst sample's.

    The statuses in USED come first.
    """

    USED = 0
    TRUNCATED = 1
    OVERLONG = 2
    WITHOUT_LABEL = 3
    EMPTY = 4
    BAD = 5
    BLANK = 6  # blank line of a JSON Lines file: not a row


USED = (Status.USED, Status.TRUNCATED)
DROPPED = (Status.OVERLONG, Status.WITHOUT_LABEL, Status.EMPTY, Status.BAD)


def judge(sample: Row, roles: Collection[str] = ROLES) -> tuple[Status, str]:
    """Return the status of a sample before tokenization, and the reason if it is BAD.

    `roles` are those that the chat template accepts.
    """
    if not sample:
        return Status.BLANK, ""
    if reason := sample.get("fault") or fault(sample, roles):
        return Status.BAD, reason
    if "text" in sample:
        return Status.USED if sample["text"].strip() else Status.EMPTY, ""
    turns = [m for m in sample["messages"] if m["role"] in ("user", "assistant")]
    if not turns or not all(m["content"].strip() or m.get(CALLS) for m in turns):
        return Status.EMPTY, ""
    # A chat of assistant turns only has no prompt.
    answered = sample["messages"][0]["role"] != "assistant" and any(map(is_answer, turns))
    return Status.USED if answered else Status.WITHOUT_LABEL, ""


def is_answer(turn: Row) -> bool:
    """True for an assistant turn with loss; one of weight 0 is part of the prompt of later answers."""
    return turn["role"] == "assistant" and turn.get(WEIGHT, 1) != 0


def fault(sample: Row, roles: Collection[str]) -> str | None:
    """Return a description of the first value that cannot be used (type, UTF-8, role, weight), or None."""
    if "text" in sample:
        return text_fault("its text", sample["text"])
    if not is_objects(sample["messages"]):
        return "its messages are not a list of messages"
    for turn in sample["messages"]:
        if reason := text_fault("the role of a message", turn.get("role")):
            return reason
        if turn["role"] not in roles:
            return f"unknown role {turn['role']!r}; known are {', '.join([*ROLES, *ROLE_ALIASES])}"
        if not is_objects(turn.get(CALLS, [])):
            return f"the tool calls of the {turn['role']} are not a list of calls"
        if reason := text_fault(f"the content of the {turn['role']}", turn.get("content")):
            return reason
        if turn.get(WEIGHT, 1) not in (0, 1):
            return f"the weight of the {turn['role']} is {turn[WEIGHT]!r}, not 0 or 1"
    return None


def text_fault(name: str, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"{name} is {'missing' if value is None else f'of type {type(value).__name__}'}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates of a JSON escape
        return f"{name} is not UTF-8"
    # The readers replace undecodable bytes with U+FFFD.
    return f"{name} is not UTF-8" if "\ufffd" in value else None
