"""Where rows come from, and how a row becomes a sample: one function per data set.

Each takes the data settings and a split and returns a Source. `detect` serves every data set that is not in
the DATASETS table, by the names of its columns.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import json
import logging
import lzma
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas as pd
from datasets import Dataset, Features, IterableDataset, Value
from datasets.naming import camelcase_to_snakecase

from core.errors import first_line, origins, raise_interrupt
from core.hub import refuse_silent_hub
from data import demo as demo_set
from data.cache import CLOSED, NotStored, cache_folder, refuse_cut_off, storing, why_not_stored
from data.chat import Row, is_chat
from data.settings import SYSTEM_PROMPT, DataConfig

logger = logging.getLogger(__name__)

# Columns of prompt/answer data, tried in this order.
PAIRS = (
    ("problem", "generated_solution"),
    ("problem", "solution"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
CONTEXTS = ("input", "context")  # what an instruction is about
TOOLS = "tools"  # what a chat's assistant may call
CALLS = "tool_calls"  # what it calls in a message
MATHS = "problem"  # a prompt column that the default system prompt fits
TEXTS = ("text", "content")
OTHER_CHATS = ("conversations", "conversation")  # beside `messages`; not all that are called so hold messages
SHARE_GPT = {"human": "user", "gpt": "assistant"}  # senders there, roles here
READERS = {".jsonl": "text", ".txt": "text", ".json": "json", ".parquet": "parquet"}
READERS |= {".csv": "csv", ".tsv": "csv"}
PACKERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # what may follow such a suffix
FIELDS = {  # what columns hold -> the flags that name them
    "chats": ("dataset_messages_field",),
    "text": ("dataset_text_field",),
    "pairs": ("dataset_prompt_field", "dataset_completion_field"),
}
KNOWN = (  # columns that are found by name, in this order
    ("chats", ("messages",)),
    *(("pairs", fields) for fields in PAIRS),
    *(("chats", (field,)) for field in OTHER_CHATS),
    *(("text", (field,)) for field in TEXTS),
)
SHOWN = 80  # characters of a system prompt in one line
UTF8 = "utf-8-sig"  # without the byte-order mark that a file of text may begin with
PEEK = 100  # rows whose keys are a data set's columns, where no header names them
TOO_DEEP = "JSON that is nested too deeply"
NO_ROWS = "BatchSize must be greater than 0"  # what `datasets` says of a parquet file without any


class Unreadable(ValueError):
    """Rows that cannot be read."""


class Columns(NamedTuple):
    """The columns that are trained on: what a Source has but its rows."""

    to_sample: Callable[[Row], Row]
    chat: bool
    system: str
    shown: str
    tools: bool


@dataclass(frozen=True)
class Source:
    """One split: its rows, and the function that makes `{"messages": ...}` or `{"text": ...}` of a row."""

    rows: Dataset | IterableDataset
    to_sample: Callable[[Row], Row]
    chat: bool  # False: plain text, which may be split anywhere
    system: str  # the prompt that chats begin with, unless they have one of their own
    columns: str  # which were taken, for people
    tools: bool  # whether chats may bring some
    unit: str = "row"  # what a row is called where its number is told


def demo(cfg: DataConfig, split: str) -> Source:
    """The embedded generated set: train_1M (also called train) and test."""
    split = demo_set.ALIASES.get(split, split)
    split = known_split(cfg, split, demo_set.SIZES)
    # The generator's own text is part of the fingerprint: `datasets` does not see into imported functions.
    code = Path(demo_set.__file__).read_bytes()
    with storing(cfg):
        rows = Dataset.from_generator(
            demo_set.generate,
            gen_kwargs={"split": split},
            cache_dir=cfg.data_cache_dir,
            fingerprint=hashlib.blake2b(code + split.encode(), digest_size=8).hexdigest(),
        )
    refuse_cut_off(rows)
    if cfg.streaming:
        rows = rows.to_iterable_dataset()
    return Source(rows, *choose_columns(cfg, rows.column_names))


def detect(cfg: DataConfig, split: str) -> Source:
    """Any other data set: columns named in the settings, else chat, prompt/answer or text, found by name."""
    rows, line_files = open_rows(cfg, split)
    refuse_cut_off(rows)
    unit = "line" if line_files == 1 else "row"  # of several files, a number is no line's
    with reading(cfg):
        columns = line_keys(cfg, rows, unit) if line_files else rows.column_names or seen_keys(rows)
    to_sample, *others = choose_columns(cfg, columns)
    to_sample = partial(json_line if line_files else arrow_row, to_sample)
    return Source(rows, to_sample, *others, unit=unit)


def line_keys(cfg: DataConfig, rows: Dataset | IterableDataset, unit: str) -> list[str]:
    """The keys of the first lines of JSON that are not blank; Unreadable if none of these is an object."""
    filled = ((i, from_json(row)) for i, row in enumerate(rows, start=1) if row["text"].strip())
    first = list(islice(filled, PEEK)) or [(1, "blank, and so are all others")]
    objects = [parsed for _, parsed in first if isinstance(parsed, dict)]
    if not objects:
        number, fault = first[0]
        raise Unreadable(
            f"--dataset_name {cfg.dataset_name}: {unit} {number} is {fault}; give one JSON object a line, in "
            "UTF-8, or call the file .json if it is one list of all rows"
        )
    return seen_keys(objects)


def seen_keys(rows: Iterable[Row]) -> list[str]:
    """All keys that any of the first rows has: a line of JSON may lack those that are optional."""
    return list(dict.fromkeys(chain.from_iterable(islice(rows, PEEK))))


def choose_columns(cfg: DataConfig, columns: list[str]) -> Columns:
    """Those of `columns` that the settings name, or the first of KNOWN; ValueError lists them."""
    known = f"columns of --dataset_name {cfg.dataset_name}: {', '.join(columns) or 'none'}"
    named = []
    for kind, flags in FIELDS.items():
        fields = tuple(getattr(cfg, flag) for flag in flags)
        for flag, field in zip(flags, fields, strict=True):
            if field is not None and field not in columns:
                raise ValueError(f"--{flag} {field}: there is no such column; {known}")
        named += [(kind, fields)] if fields[0] is not None else []
    found = named or [(kind, fields) for kind, fields in KNOWN if set(fields) <= set(columns)]
    if not found:
        raise ValueError(
            f"--dataset_name {cfg.dataset_name}: no chat, prompt/answer or text columns found; name them "
            "with --dataset_messages_field, --dataset_text_field, or --dataset_prompt_field and "
            f"--dataset_completion_field ({known})"
        )
    kind, fields = found[0]
    system = system_prompt(cfg, kind, fields)
    beside: tuple[str, ...] = ()  # columns that count where a row has them
    if kind == "text":
        to_sample = partial(text, *fields)
    elif kind == "chats":
        beside = (TOOLS,)
        to_sample = partial(messages, *fields, system)
    else:
        contexts = CONTEXTS if not named and fields[0] == "instruction" else ()
        beside = (*contexts, TOOLS)
        to_sample = partial(pair, *fields, contexts, system)
    asked = [*fields[:1], *(name for name in beside if name in columns)]
    shown = " -> ".join([" and ".join(asked), *fields[1:]])
    shown += describe(kind, system) + untaken({*fields, *beside}, found[1:])
    return Columns(to_sample, kind != "text", system, shown, tools=TOOLS in beside and TOOLS in columns)


def system_prompt(cfg: DataConfig, kind: str, fields: tuple[str, ...]) -> str:
    """The one that chats of these columns begin with.

    The default is for OpenMathInstruct's problems, and the demo's; all else gets one only if it was given.
    """
    fits = kind == "pairs" and fields[0] == MATHS
    return cfg.system_prompt if kind != "text" and (fits or cfg.system_prompt != SYSTEM_PROMPT) else ""


def describe(kind: str, system: str) -> str:
    if kind == "text":
        return " (plain text)"
    line = " ".join(system.split())
    quoted = f'"{line if len(line) <= SHOWN else line[:SHOWN] + "..."}"'
    whole = " (whole chats)" if kind == "chats" else ""
    return f"{whole}, {f'system prompt {quoted}' if system else 'no system prompt'}"


def untaken(taken: set[str], others: list[tuple[str, tuple[str, ...]]]) -> str:
    """The flags that take the other columns that were found, if there are any."""
    flags = [
        " ".join(f"--{flag} {field}" for flag, field in zip(FIELDS[kind], fields, strict=True))
        for kind, fields in others
        if not taken.issuperset(fields)
    ]
    return f"; to take others: {' or '.join(flags)}" if flags else ""


def messages(field: str, system: str, row: Row) -> Row:
    """A column of messages, as OpenAI has them or ShareGPT; `system` goes before those that begin without."""
    found = row.get(field)
    try:
        tools = parsed(row.get(TOOLS))
        turns = [turn(message) for message in found] if is_chat(found) else None
    except RecursionError:
        return {"fault": TOO_DEEP}
    made = {"tools": objects(tools)} if tools else {}
    if turns is None:
        return {"messages": found} | made
    asks = system and turns and turns[0].get("role") != "system"
    return {"messages": [{"role": "system", "content": system}, *turns] if asks else turns} | made


def parsed(value: Any) -> Any:
    """What a string of JSON holds, or each of a list of such, as columns have objects of many kinds.

    Items that hold nothing are none.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    elif isinstance(value, list):
        value = [item if isinstance(item, list) else parsed(item) for item in value]
    return [item for item in value if item is not None] if isinstance(value, list) else value


def arrow_row(to_sample: Callable[[Row], Row], row: Row) -> Row:
    """A sample of a row in which Arrow gave every tool and call the keys of all."""
    return to_sample(
        {name: filled(value) if name == TOOLS else with_calls(value) for name, value in row.items()}
    )


def with_calls(value: Any) -> Any:
    """Messages whose calls have no keys that hold nothing; anything else as it is."""
    if not is_chat(value):
        return value
    return [m | {CALLS: filled(m[CALLS])} if m.get(CALLS) else m for m in value]


def filled(value: Any) -> Any:
    """A value without keys that hold nothing."""
    if isinstance(value, dict):
        return {key: filled(item) for key, item in value.items() if item is not None}
    return [filled(item) for item in value] if isinstance(value, list) else value


def objects(value: Any) -> list[Row] | None:
    """A list of objects, or of the one that there is; None for anything else."""
    found = [value] if isinstance(value, dict) else value
    return found if is_chat(found) else None


def turn(message: Row) -> Row:
    """One message as chat templates take it.

    Parquet gives every message the keys of all; templates ask whether a key is there.
    """
    made = {k: v for k, v in message.items() if v is not None or k == "content"}
    if "role" not in made and "from" in made:
        sender = made.pop("from")
        role = SHARE_GPT.get(sender, sender) if isinstance(sender, str) else sender
        made |= {"role": role, "content": made.pop("value", None)}
    parts = made.get("content")
    if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        made["content"] = "".join(part["text"] for part in parts)
    if calls := parsed(made.pop(CALLS, None)):
        made["content"] = made.get("content") or ""  # of a message that only calls, it may be left out
        listed = objects(calls)
        made[CALLS] = calls if listed is None else [tool_call(call) for call in listed]
    return made


def tool_call(call: Row) -> Row:
    """A call with arguments as templates take them; OpenAI has them as a string of JSON."""
    function = call.get("function")
    arguments = parsed(function.get("arguments")) if isinstance(function, dict) else None
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def text(field: str, row: Row) -> Row:
    return {"text": row.get(field)}


def pair(prompt: str, answer: str, contexts: tuple[str, ...], system: str, row: Row) -> Row:
    """Prompt and answer columns, text or messages, as a chat; what is in `contexts` follows the prompt."""
    question, reply = (as_text(row.get(name)) for name in (prompt, answer))
    if is_chat(question) and is_chat(reply):
        turns = question + reply
    else:
        if isinstance(question, str):
            found = (passage for name in contexts for passage in passages(row.get(name)))
            question = "\n\n".join([question, *found])
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages(prompt, system, {prompt: turns, TOOLS: row.get(TOOLS)})


def passages(value: Any) -> list[str]:
    """The texts of a column; none where it holds something else."""
    listed = value if isinstance(value, list) else [value]
    found = [as_text(item) for item in listed if item is not None]
    return [text for text in found if text] if all(isinstance(text, str) for text in found) else []


def as_text(value: Any) -> Any:
    """A number as it is written: answers may be some."""
    is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


def json_line(to_sample: Callable[[Row], Row], row: Row) -> Row:
    """A sample of one line of JSON; of a blank one it is empty, of a broken one it tells what is wrong."""
    if not row["text"].strip():
        return {"text": ""}
    parsed = from_json(row)
    return {"fault": parsed} if isinstance(parsed, str) else to_sample(parsed)


def from_json(row: Row) -> Row | str:
    """The object that a line of JSON holds, or what is wrong with the line."""
    try:
        parsed = json.loads(row["text"])
    except RecursionError:
        return TOO_DEEP
    except ValueError:
        return "not valid JSON"
    return parsed if isinstance(parsed, dict) else "JSON, but no object"


def open_rows(cfg: DataConfig, split: str) -> tuple[Dataset | IterableDataset, int]:
    """Rows of a file, folder or hub data set, and of how many files they are raw lines of JSON, if they are.

    Lines are parsed one at a time, later: so one broken line costs one row, not the file.
    """
    name, configuration = name_and_configuration(cfg)
    path = Path(name).expanduser()
    name = str(path) if path.exists() else name
    if format_of(name) in READERS and not path.is_file():
        raise ValueError(f"--dataset_name {cfg.dataset_name}: there is no such file; check the path")
    if path.is_file() and configuration:
        raise ValueError(f"--dataset_name {cfg.dataset_name}: a file has no configurations; give {name}")
    try:
        if path.is_file():
            files: dict[str, list[str]] = {"train": [str(path)]}
        else:
            if not is_prepared(cfg, name):
                refuse_silent_hub(name, ("README.md",), None, repo_type="dataset")
            builder = datasets.load_dataset_builder(name, configuration, cache_dir=cfg.data_cache_dir)
            files = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    except Exception as error:  # hub client, fsspec and parsers raise what they like
        raise which_configuration(cfg, error) or unreadable(cfg, error) from error
    if files:
        split = known_split(cfg, split, files)
    common: dict[str, Any] = {"split": split, "cache_dir": cfg.data_cache_dir, "streaming": cfg.streaming}
    with reading(cfg):
        if (local := [Path(file) for file in files.get(split, [])]) and all(map(is_empty, local)):
            raise Unreadable(f"--dataset_name {cfg.dataset_name}: {local[0].name} is empty")
    formats = {format_of(file) for file in files.get(split, [])}
    suffix = formats.pop() if len(formats) == 1 else ""
    reader, line_files = READERS.get(suffix), len(files[split]) if suffix == ".jsonl" else 0
    if path.is_file() and reader is None:
        known = f"{', '.join(READERS)}, and these with {', '.join(PACKERS)}"
        raise ValueError(f"--dataset_name {name}: not a data file; these are read: {known}")
    with reading(cfg):
        if path.is_file() or line_files:
            # Undecodable bytes become U+FFFD, which marks the row as unusable.
            options: dict[str, Any] = {"encoding_errors": "replace"} if reader in ("text", "csv") else {}
            options |= {"encoding": UTF8} if reader == "text" else {}
            if reader == "csv":
                tabs = {"sep": "\t"} if suffix == ".tsv" else {}
                options |= tabs | as_written(files[split], tabs)
            return datasets.load_dataset(
                reader, data_files={split: files[split]}, **options, **common
            ), line_files
        # Only the split's own files: OpenMathInstruct-2's `train` alone is 14 times its train_1M.
        only: dict[str, Any] = (
            {"data_files": {split: files[split]}, "verification_mode": "no_checks"} if files else {}
        )
        if builder.name == "text" and builder.config.encoding == "utf-8":
            only["encoding"] = UTF8
        if files and builder.name == "csv":
            only |= as_written(files[split], builder.config.pd_read_csv_kwargs)
        return datasets.load_dataset(name, configuration, **only, **common), 0


def is_prepared(cfg: DataConfig, name: str) -> bool:
    """Whether `datasets` has rows of this hub id in its cache, which it takes if the hub does not answer."""
    *owner, last = name.split("/")
    return (cache_folder(cfg) / "___".join([*owner, camelcase_to_snakecase(last)])).is_dir()


def is_empty(file: Path) -> bool:
    """Whether a local file, once it is unpacked, has no byte."""
    if not file.is_file() or not file.stat().st_size:
        return file.is_file()
    with PACKERS.get(file.suffix, open)(file, "rb") as opened:
        return opened.read(4) in (b"", codecs.BOM_UTF8)


def format_of(file: str) -> str:
    """The suffix that tells how a file is read: .jsonl of rows.jsonl and rows.jsonl.gz."""
    return Path(next((file.removesuffix(p) for p in PACKERS if file.endswith(p)), file)).suffix


def as_written(files: list[str], reading: dict[str, Any]) -> dict[str, Any]:
    """Options for cells as text, 007 and NA too, of tables whose columns can be asked for.

    `reading`: what pandas reads them with.
    """
    if not Path(files[0]).is_file():
        return {}
    asked = reading | {"nrows": 0, "chunksize": None, "encoding_errors": "replace"}
    try:
        header = pd.read_csv(files[0], **asked)
    except ValueError:  # as of an archive of several
        return {}
    return {"keep_default_na": False, "features": Features({str(n): Value("string") for n in header.columns})}


def name_and_configuration(cfg: DataConfig) -> tuple[str, str | None]:
    """The path or hub id of --dataset_name, and what follows its colon; a path that exists is taken whole."""
    name, _, configuration = cfg.dataset_name.rpartition(":")
    if not name or not configuration or "/" in configuration or Path(cfg.dataset_name).expanduser().exists():
        return cfg.dataset_name, None
    return name, configuration


def which_configuration(cfg: DataConfig, error: Exception) -> ValueError | None:
    """What to raise for an error of `datasets` that asks for one of a data set's configurations."""
    listed = re.search(r"(?:Config name is missing|BuilderConfig .* not found).*?\[(.*?)\]", str(error), re.S)
    if listed is None:
        return None
    known, (name, configuration) = re.findall(r"'(.*?)'", listed[1]), name_and_configuration(cfg)
    wrong = f"there is no configuration {configuration}" if configuration else "has several configurations"
    return ValueError(
        f"--dataset_name {cfg.dataset_name}: {wrong}; give one of them, as in --dataset_name "
        f"{name}:{known[0]}; there are: {', '.join(known)}"
    )


def known_split(cfg: DataConfig, split: str, splits: Iterable[str]) -> str:
    """`split`, or where that is the default one and there is but another, that. ValueError lists them."""
    if split in splits:
        return split
    known = list(splits)
    if split == DataConfig().split_name and len(known) == 1 and known != [cfg.eval_split]:
        logger.warning(
            "--split_name %s: %s has no such split, but %s alone; taken", split, cfg.dataset_name, *known
        )
        return known[0]
    flag = "eval_split" if split == cfg.eval_split else "split_name"
    raise ValueError(
        f"--{flag} {split}: no such split in --dataset_name {cfg.dataset_name}; there are: {', '.join(known)}"
    )


@contextmanager
def reading(cfg: DataConfig) -> Iterator[None]:
    """Inside, rows are opened or read: what `datasets`, a hub's client or a parser raises is `unreadable`."""
    try:
        yield
    except Unreadable:
        raise
    except Exception as error:
        raise unreadable(cfg, error) from error


def unreadable(cfg: DataConfig, error: Exception) -> Unreadable | NotStored:
    """What to raise for an error of `datasets`, unless it came of an interrupt, which is raised instead."""
    raise_interrupt(error)
    if (reason := why_not_stored(cfg, error)) is not None:
        return reason
    for origin in origins(error):
        if isinstance(origin, OSError) and origin.errno in CLOSED and origin.filename:  # a socket's has none
            reason = f"{first_line(origin)}; check the permissions"
            return Unreadable(f"--dataset_name {cfg.dataset_name}: cannot be read: {reason}")
    cause = error
    while isinstance(cause, datasets.exceptions.DatasetGenerationError):
        if (deeper := cause.__cause__ or cause.__context__) is None:
            break
        cause = deeper
    if first_line(cause).startswith(NO_ROWS):
        return Unreadable(
            f"--dataset_name {cfg.dataset_name}: a .parquet file has no rows; leave it out, or give another"
        )
    what = f"--dataset_name {cfg.dataset_name}: cannot be read: {first_line(cause).rstrip('.')}; "
    if Path(name_and_configuration(cfg)[0]).expanduser().exists():
        return Unreadable(
            f"{what}check that it is whole; files of one split are of one kind and have the same columns"
        )
    return Unreadable(
        f"{what}check the name and the "
        f"network, or give a local folder, a file ({', '.join(READERS)}), or --dataset_name demo"
    )
