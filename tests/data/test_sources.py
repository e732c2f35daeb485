"""Every data set of the table, columns found by name, faulty rows, and errors a user can act on."""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import zipfile
from io import BytesIO
from itertools import chain
from pathlib import Path

import datasets
import huggingface_hub
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter, SchemaInferenceError
from datasets.packaged_modules.generator.generator import Generator
from datasets.packaged_modules.text.text import Text

from data import cache
from data.build import DATASETS, BatchShape, build_loaders
from data.cache import NotStored
from data.chat import Encoder, Status, load_tokenizer, why_unusable
from data.collate import IGNORE
from data.demo import SIZES, generate
from data.loader import StreamItems
from data.settings import SYSTEM_PROMPT, DataConfig
from data.sources import TOOLS, arrow_row, choose_columns, detect, unreadable

OPENMATH = Path(__file__).parents[3] / "shared" / "data" / "openmath_gsm8k"
PAIR = {"problem": "What is 1 + 1?", "generated_solution": "It is 2."}
VOCABULARY = 2048


@pytest.fixture
def tokenizer():
    return load_tokenizer("demo", family="llama")


@pytest.fixture
def load(tokenizer, tmp_path):
    """Loaders over a file with these bytes, or over a data set by name."""

    def load(contents=b"", name="rows.jsonl", **settings):
        if contents or name != "rows.jsonl":
            (tmp_path / name).write_bytes(contents)
            settings = {"dataset_name": str(tmp_path / name), "split_name": "train", **settings}
        defaults = {
            "num_workers": 0,
            "num_proc": 1,
            "eval_samples": 0,
            "data_cache_dir": str(tmp_path / "cache"),
        }
        return build_loaders(
            DataConfig(**{**defaults, **settings}),
            tokenizer,
            BatchShape(batch_size=1, eval_batch_size=1, pad_multiple=8),
            seed=0,
            vocab_size=VOCABULARY,
            max_positions=2048,
        )

    return load


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def texts(loaders, tokenizer):
    """What an unpacked epoch holds: the decoded tokens of each row and of its loss, by row number."""
    found = {}
    for batch in loaders.train:
        ids, labels = batch.inputs["input_ids"][0, : batch.real_tokens], batch.inputs["labels"][0]
        found[batch.sample_ids[0]] = tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE])
    return [found[row] for row in sorted(found)]


def answers(loaders, tokenizer):
    return [answer.removesuffix("<|eot_id|>") for _, answer in texts(loaders, tokenizer)]


def table_source(name, tmp_path, streaming=False):
    settings = {"dataset_name": name, "data_cache_dir": str(tmp_path / "cache"), "streaming": streaming}
    return DATASETS[name](DataConfig(**settings), "train_1M")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_of_the_table_have_the_schema_and_are_repeatable(name, streaming, tmp_path):
    first, second = (table_source(name, tmp_path, streaming) for _ in range(2))
    samples = [first.to_sample(row) for row in first.rows]
    assert samples == [second.to_sample(row) for row in second.rows]
    assert samples and all(why_unusable(sample) == 0 for sample in samples)
    assert all(("messages" if first.chat else "text") in sample for sample in samples)


@pytest.mark.parametrize("split", SIZES)
def test_demo_answers_are_arithmetically_right(split):
    rows = list(generate(split))
    assert len(rows) == SIZES[split] and len({row["problem"] for row in rows}) == len(rows)
    checked = 0
    for row in rows:
        *steps, last = row["generated_solution"].split("\n")
        assert last == f"The answer is $\\boxed{{{row['expected_answer']}}}$."
        equations = re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", "\n".join(steps))
        assert len(equations) >= len(steps)
        for left, right in equations:
            assert eval(left) == int(right), row
        # Every number that a step starts from stands in the problem or is an earlier step's result.
        assert row["expected_answer"] in [right for _, right in equations]
        known = set(re.findall(r"\d+", row["problem"])) | {"2", "3", "4", "100"}
        for left, right in equations:
            assert set(re.findall(r"\d+", left)) <= known, row
            known.add(right)
        checked += len(equations)
    assert checked > 2 * len(rows)


def test_demo_splits_share_no_problem_and_never_change():
    train, test = (list(generate(split)) for split in ("train_1M", "test"))
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}
    assert train == list(generate("train_1M"))
    text = json.dumps([test, train]).encode()
    assert (
        hashlib.sha256(text).hexdigest()[:16] == "ae52e7bdbd6b61fa"
    )  # the tokenizer was trained on these rows


def test_demo_is_the_default_and_train_is_train_1m(load):
    named, default = load(num_of_samples=20, split_name="train"), load(num_of_samples=20)
    assert named.train.state_dict() == default.train.state_dict()
    assert default.report.used == 20


def test_the_rate_of_tokenisation_is_reported_once(load, tmp_path):
    rows = lines(*({"problem": f"What is {i}?", "generated_solution": str(i)} for i in range(300)))
    again = {"dataset_name": str(tmp_path / "rows.jsonl"), "split_name": "train"}
    first, cached, more = load(rows), load(**again), load(**again, num_proc=2, num_of_samples=200)
    assert first.report.rows_per_second > 0 and first.report.processes == 1
    assert (
        f"tokenised by one process at {first.report.rows_per_second:,.0f} rows/s" in first.report.lines()[0]
    )
    assert cached.report.rows_per_second is None and "tokenised" not in cached.report.lines()[0]
    assert more.report.rows_per_second > 0 and "by 2 processes" in more.report.lines()[0]
    assert load(**again, streaming=True).report.rows_per_second is None


@pytest.mark.skipif(not OPENMATH.is_dir(), reason="no GSM8K sample folder beside the repository")
@pytest.mark.parametrize("streaming", [False, True])
def test_real_rows_in_openmath_columns(load, streaming):
    loaders = load(
        dataset_name=str(OPENMATH),
        eval_split="test",
        eval_samples=50,
        num_of_samples=300,
        streaming=streaming,
    )
    assert loaders.report.used == 300 and loaders.eval_report.used == 50
    assert loaders.report.packing_efficiency > 0.97
    assert all("\\boxed{" in answer for _, answer in loaders.eval_prompts)


@pytest.mark.parametrize(
    ("row", "settings", "prompt", "answer"),
    [
        (PAIR, {}, PAIR["problem"], PAIR["generated_solution"]),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, {}, "Add.\n\n1, 2", "3"),
        ({"instruction": "Add.", "input": "", "output": "3"}, {}, "Add.", "3"),
        ({"instruction": "Add.", "context": "1, 2", "response": "3"}, {}, "Add.\n\n1, 2", "3"),
        ({"instruction": "Add.", "context": ["1", "2"], "response": "3"}, {}, "Add.\n\n1\n\n2", "3"),
        ({"instruction": "Add.", "context": [1, None], "response": "3"}, {}, "Add.\n\n1", "3"),
        ({"instruction": "Add.", "context": {"id": 7}, "response": "3"}, {}, "Add.", "3"),
        ({"instruction": "Double it.", "input": 21, "output": 42}, {}, "Double it.\n\n21", "42"),
        ({"question": "1?", "answer": "2"}, {}, "1?", "2"),
        ({"prompt": "1?", "completion": "2"}, {}, "1?", "2"),
        (
            {**PAIR, "a": "one", "b": "two"},
            {"dataset_prompt_field": "a", "dataset_completion_field": "b"},
            "one",
            "two",
        ),
    ],
)
def test_prompt_columns_are_found_by_name(row, settings, prompt, answer):
    to_sample, chat, *_ = choose_columns(DataConfig(system_prompt="Think.", **settings), list(row))
    assert chat
    assert to_sample(row)["messages"] == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
    ]
    to_sample, *_ = choose_columns(DataConfig(system_prompt="", **settings), list(row))
    assert [m["role"] for m in to_sample(row)["messages"]] == ["user", "assistant"]


TOOL = {"type": "function", "function": {"name": "weather", "required": ["1"]}}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}


def sample_with_tools(tools, calls, *, arrow=False, **content):
    row = {"messages": [{"role": "assistant", "tool_calls": calls, **content}], "tools": tools}
    to_sample, *_, shown, with_tools = choose_columns(DataConfig(), list(row))
    assert with_tools and shown.startswith("messages and tools (whole chats)")
    return arrow_row(to_sample, row) if arrow else to_sample(row)


@pytest.mark.parametrize("written", [json.dumps, lambda value: value], ids=["JSON", "objects"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["no", "null", "empty"])
def test_tools_and_their_calls_are_taken_as_templates_have_them(written, content):
    function = {**TOOL_CALL["function"], "arguments": written(TOOL_CALL["function"]["arguments"])}
    sample = sample_with_tools(written([TOOL]), [TOOL_CALL | {"function": function}], **content)
    assert sample["tools"] == [TOOL]
    (message,) = sample["messages"]
    assert message == {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}


@pytest.mark.parametrize("form", [TOOL_CALL, json.dumps(TOOL_CALL), [json.dumps(TOOL_CALL)]])
def test_one_call_is_a_list_of_one(form):
    (message,) = sample_with_tools(None, form, content="I look.")["messages"]
    assert message["tool_calls"] == [TOOL_CALL]


@pytest.mark.parametrize("none", [None, "", "null", "[]", "{}", [], {}])
def test_no_tools_are_none(none):
    sample = sample_with_tools(none, none, content="I look.")
    assert sample == {"messages": [{"role": "assistant", "content": "I look."}]}


@pytest.mark.parametrize("other", ["search", ["search"], 5])
def test_what_is_no_list_of_functions_is_left_out_but_a_call_is_kept_to_be_refused(other):
    sample = sample_with_tools(other, other, content="I look.")
    assert sample["tools"] is None and sample["messages"][0]["tool_calls"] == other


def test_keys_that_arrow_fills_in_are_no_arguments():
    other = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    stored = Dataset.from_list([{"calls": [TOOL_CALL]}, {"calls": [other]}])
    assert stored[0]["calls"][0]["function"]["arguments"] == {"place": "Oslo", "query": None}
    for row, call in zip(stored, (TOOL_CALL, other), strict=True):
        sample = sample_with_tools(row["calls"], row["calls"], arrow=True)
        assert sample["messages"][0]["tool_calls"] == [call] == sample["tools"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_null_that_is_written_is_kept_unless_arrow_may_have_written_it(tmp_path, suffix):
    null = {"type": "function", "function": {"name": "weather", "arguments": {"place": None}}}
    row, file = (
        {"messages": [{"role": "assistant", "tool_calls": [null]}], "tools": [null]},
        tmp_path / "rows",
    )
    if suffix == "jsonl":
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    else:
        Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    source = detect(DataConfig(dataset_name=f"{file}.{suffix}", split_name="train"), "train")
    sample = source.to_sample(source.rows[0])
    call = (
        null if suffix == "jsonl" else {"type": "function", "function": {"name": "weather", "arguments": {}}}
    )
    assert sample["tools"] == sample["messages"][0]["tool_calls"] == [call]


@pytest.mark.parametrize("where", [TOOLS, "tool_calls"])
def test_tools_that_are_nested_too_deeply_cost_a_row(where):
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    sample = sample_with_tools(*((deep, None) if where == TOOLS else (None, deep)), content="I look.")
    assert sample == {"fault": "JSON that is nested too deeply"}


@pytest.mark.parametrize("chats", [True, False])
def test_tools_beside_a_prompt_are_taken(chats):
    row = {"prompt": "1?", "completion": "2", "tools": json.dumps([TOOL])}
    if chats:
        row |= {"prompt": CHAT[:1], "completion": CHAT[1:]}
    to_sample, *_, shown, with_tools = choose_columns(DataConfig(), list(row))
    assert with_tools and shown.startswith("prompt and tools -> completion")
    sample = to_sample(row)
    assert sample["tools"] == [TOOL] and [m["role"] for m in sample["messages"]] == ["user", "assistant"]
    assert "tools" not in to_sample(row | {"tools": None})


def test_empty_places_in_lists_are_no_calls():
    sample = sample_with_tools([None, TOOL], "[null]", content="I look.")
    assert sample == {"messages": [{"role": "assistant", "content": "I look."}], "tools": [TOOL]}


@pytest.mark.parametrize(
    ("row", "settings", "maths"),
    [
        (PAIR, {}, True),
        ({"problem": "1?", "solution": "2"}, {}, True),
        ({**PAIR, "b": "2"}, {"dataset_prompt_field": "problem", "dataset_completion_field": "b"}, True),
        ({"instruction": "Translate.", "input": "cat", "output": "chat"}, {}, False),
        ({"question": "1?", "answer": "2"}, {}, False),
        ({"a": "1?", "b": "2"}, {"dataset_prompt_field": "a", "dataset_completion_field": "b"}, False),
    ],
)
def test_the_default_system_prompt_is_for_problems_alone(row, settings, maths):
    to_sample, _, system, *_ = choose_columns(DataConfig(**settings), list(row))
    assert system == (SYSTEM_PROMPT if maths else "")
    said = [m["content"] for m in to_sample(row)["messages"] if m["role"] == "system"]
    assert said == ([SYSTEM_PROMPT] if maths else [])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("first", [{"instruction": "Hi.", "output": "Hello."}, {"id": 1}])
def test_columns_are_those_of_all_first_lines(load, tokenizer, first, streaming):
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    loaders = load(lines(first, *[row] * 3), packing=False, streaming=streaming)
    found = [text for text, _ in texts(loaders, tokenizer)]
    assert all("Add.\n\n1, 2" in text for text in found[-3:])
    assert (loaders.report.rows, loaders.report.used) == (4, len(found)) == (4, 3 + ("output" in first))


def test_an_input_is_found_in_a_row_past_those_that_name_the_columns(load, tokenizer):
    rows = [{"instruction": f"Say {i}.", "output": str(i)} for i in range(200)]
    late = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    *_, (last, _) = texts(load(lines(*rows, late), packing=False), tokenizer)
    assert "Add.\n\n1, 2" in last


def test_columns_named_in_the_settings_may_be_absent_from_the_first_line(load, tokenizer):
    contents = lines({"id": 1}, {"a": "one", "b": "two"})
    loaders = load(contents, dataset_prompt_field="a", dataset_completion_field="b", packing=False)
    assert answers(loaders, tokenizer) == ["two"]


@pytest.mark.parametrize(
    ("columns", "settings", "shown"),
    [
        (
            ["problem", "generated_solution"],
            {},
            f'problem -> generated_solution, system prompt "{SYSTEM_PROMPT}"',
        ),
        (["problem", "solution"], {"system_prompt": ""}, "problem -> solution, no system prompt"),
        (
            ["prompt", "completion", "text"],
            {},
            "prompt -> completion, no system prompt; to take others: --dataset_text_field text",
        ),
        (
            ["instruction", "input", "output", "text"],
            {},
            "instruction and input -> output, no system prompt; to take others: --dataset_text_field text",
        ),
        (
            ["messages", "prompt", "response", "text"],
            {"system_prompt": "Be\n short."},
            'messages (whole chats), system prompt "Be short."; to take others: '
            "--dataset_prompt_field prompt --dataset_completion_field response or --dataset_text_field text",
        ),
        (["a", "messages", "text"], {"dataset_text_field": "a"}, "a (plain text)"),
        (
            ["a", "b", "text"],
            {"dataset_prompt_field": "a", "dataset_completion_field": "b", "system_prompt": "so " * 90},
            f'a -> b, system prompt "{("so " * 90)[:80]}..."',
        ),
        (["conversation"], {}, "conversation (whole chats), no system prompt"),
    ],
)
def test_the_columns_that_are_taken_are_told(columns, settings, shown):
    assert choose_columns(DataConfig(**settings), columns).shown == shown


def test_the_report_tells_columns_and_those_of_evaluation_if_they_differ(load, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines(*[{"prompt": "a", "completion": "b"}] * 20))
    (tmp_path / "set" / "test.jsonl").write_bytes(lines(*[{"text": "two words"}] * 3))
    settings = {"dataset_name": str(tmp_path / "set"), "split_name": "train", "eval_samples": 2}
    for eval_split, told in ((None, False), ("test", True)):
        loaders = load(**settings, eval_split=eval_split)
        train, held = loaders.report, loaders.eval_report
        assert "columns: prompt -> completion, no system prompt" in train.lines()
        assert ("columns: text (plain text)" in held.lines(after=train)) == told
        assert any(line.startswith("columns: ") for line in held.lines(after=train)) == told
        assert held.as_dict()["columns"] == held.columns and "columns" not in loaders.train.identity


def test_chat_and_text_columns_are_found_by_name():
    cfg = DataConfig()
    turns = [{"role": "user", "content": "a"}]
    to_sample, chat, *_ = choose_columns(cfg, ["text", "messages"])
    assert chat and to_sample({"messages": turns}) == {"messages": turns}
    with_all_keys = [turn | {"tool_calls": None} for turn in turns]  # as Parquet has them
    assert to_sample({"messages": with_all_keys}) == {"messages": turns}
    for name in ("text", "content"):
        to_sample, chat, *_ = choose_columns(cfg, ["id", name])
        assert not chat and to_sample({"id": 1, name: "x"}) == {"text": "x"}
    to_sample, chat, *_ = choose_columns(DataConfig(dataset_text_field="id"), ["id", "messages"])
    assert not chat and to_sample({"id": "x"}) == {"text": "x"}


CHAT = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."}]
SHARE_GPT = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "One."}]
PARTS = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"messages": CHAT}, {}),
        ({"messages": PARTS}, {}),
        ({"conversations": CHAT}, {}),
        ({"conversations": SHARE_GPT}, {}),
        ({"turns": CHAT, "messages": []}, {"dataset_messages_field": "turns"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}),
    ],
)
def test_chats_are_read_in_the_forms_that_sets_have_them(row, settings):
    to_sample, chat, *_ = choose_columns(DataConfig(system_prompt="", **settings), list(row))
    assert chat and to_sample(row) == {"messages": CHAT}


def test_a_system_prompt_that_is_given_begins_whole_chats_that_have_none(load, tokenizer):
    own = [{"role": "system", "content": "Of its own."}, *CHAT]
    contents = lines({"messages": CHAT}, {"messages": own})
    plain, asked = (
        [text for text, _ in texts(load(contents, packing=False, **settings), tokenizer)]
        for settings in ({}, {"system_prompt": "Be short."})
    )
    assert "Be short." in asked[0] and asked[0] != plain[0]
    assert "Of its own." in asked[1] and asked[1] == plain[1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "mark"), [("train.csv", b","), ("train.tsv", b"\t")])
@pytest.mark.parametrize("folder", [False, True])
def test_cells_of_a_table_are_text(load, tokenizer, tmp_path, streaming, name, mark, folder):
    cells = ["2", "007", "2.50", "NA", "None", "yes"]
    rows = b"".join(b"What?%s%s\n" % (mark, cell.encode()) for cell in cells)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(b"question%sanswer\n" % mark + rows)
    path = tmp_path / "set" / name if not folder else tmp_path / "set"
    loaders = load(dataset_name=str(path), split_name="train", packing=False, streaming=streaming)
    assert answers(loaders, tokenizer) == cells


@pytest.mark.parametrize(
    ("options", "contents", "wanted"),
    [
        ('sep: ";"', "question;answer\nWhat?;07\n", "07"),
        ("skiprows: 1", "a line before\nquestion,answer\nWhat?,07\n", "07"),
        ("column_names: [question, answer]", "What?,07\n", "07"),
        ("encoding: latin-1", "question,answer,caf\u00e9\nWhat?,07,x\n", "07"),
    ],
)
def test_tables_are_read_as_their_folder_says(load, tokenizer, tmp_path, options, contents, wanted):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text(contents, encoding="latin-1")
    config = f"- config_name: default\n  data_files: train.csv\n  {options}\n"
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{config}---\n")
    loaders = load(dataset_name=str(tmp_path / "set"), split_name="train", packing=False)
    assert answers(loaders, tokenizer) == [wanted]


def test_archives_of_several_tables_are_read_as_they_come(load, tokenizer, tmp_path):
    (tmp_path / "set").mkdir()
    with zipfile.ZipFile(tmp_path / "set" / "tables.zip", "w") as archive:
        for name in ("a.csv", "b.csv"):
            archive.writestr(name, "question,answer\nWhat?,One.\n")
    loaders = load(dataset_name=str(tmp_path / "set"), split_name="train", packing=False)
    assert answers(loaders, tokenizer) == ["One.", "One."]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": ["human"], "value": "x"}]},
        {"conversations": [{"from": {"a": 1}, "value": "x"}]},
    ],
)
def test_senders_that_are_no_text_cost_a_row(load, tokenizer, row):
    loaders = load(lines(row, {"conversations": SHARE_GPT}), packing=False)
    assert answers(loaders, tokenizer) == ["One."] and loaders.report.bad_rows == 1


def test_the_only_split_is_taken_for_the_default_one_and_said(load, tokenizer, caplog):
    loaders = load(lines(PAIR), packing=False, split_name="train_1M")
    assert answers(loaders, tokenizer) == ["It is 2."]
    assert "has no such split, but train alone; taken" in caplog.text
    with pytest.raises(
        ValueError, match="--split_name train_1M: no such split"
    ):  # it is what evaluation takes
        load(lines(PAIR), split_name="train_1M", eval_split="train")


def test_numbers_are_answers_and_no_number_is_none():
    to_sample, *_ = choose_columns(DataConfig(system_prompt=""), ["question", "answer"])
    said = [to_sample({"question": "?", "answer": a})["messages"][1]["content"] for a in (5, 2.5, True, None)]
    assert said == ["5", "2.5", True, None]
    assert to_sample({"question": "?", "answer": 10**400})["messages"][1]["content"] == str(10**400)
    nan = to_sample({"question": "?", "answer": float("nan")})
    assert why_unusable(nan) == Status.BAD


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"text": ["a"]}, "its text is of type list, not text"),
        ({"messages": "a"}, "its messages are of type str, not a list"),
        ({"messages": ["a"]}, "a message is of type str, not a role and its content"),
        ({"messages": [{"role": None, "content": "a"}]}, "the role of a message is missing, not text"),
        ({"messages": [CHAT[0], {"role": "assistant"}]}, "what the assistant says is missing, not text"),
        ({"problem": "a", "generated_solution": [1]}, "what the assistant says is of type list, not text"),
    ],
)
def test_the_first_bad_row_is_told_with_what_is_wrong_in_it(load, row, wrong):
    with pytest.raises(ValueError, match=f"no row can be used .2 bad: line 1: {re.escape(wrong)}.; check"):
        load(lines(row, row), packing=False)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"problem": "cut', "not valid JSON"),
        (b"[1, 2]", "JSON, but no object"),
        (b"[" * 100_000, "JSON that is nested too deeply"),
    ],
    ids=["broken", "list", "deep"],
)
def test_a_broken_line_is_told_as_an_editor_counts(load, tmp_path, streaming, line, wrong):
    whole = lines(PAIR) * 9 + b"\n"  # a blank line counts
    report = load(whole + line + b"\n" + lines(PAIR), streaming=streaming).report
    assert report.first_bad_row == f"line 11: {wrong}" and f"({report.first_bad_row})" in report.lines()[-1]
    (tmp_path / "set").mkdir()
    for name, contents in (("train-0.jsonl", lines(PAIR)), ("train-1.jsonl", line + b"\n")):
        (tmp_path / "set" / name).write_bytes(contents)
    several = load(dataset_name=str(tmp_path / "set"), split_name="train", streaming=streaming)
    assert several.report.first_bad_row == f"row 2: {wrong}"


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_no_lines_are_counted_from_one(load, streaming):
    rows = [PAIR, PAIR, {"problem": "a", "generated_solution": None}]
    report = load(json.dumps(rows).encode(), name="a.json", streaming=streaming).report
    assert report.first_bad_row == "row 3: what the assistant says is missing, not text"


def test_a_folder_of_files_that_do_not_fit_together_is_told_so(load, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").write_text("question,answer\n1?,2\n")
    (tmp_path / "set" / "b.csv").write_text("other\n1\n")
    with pytest.raises(ValueError, match=r"cannot be read: .*; files of one split .* have the same columns"):
        load(dataset_name=str(tmp_path / "set"), split_name="train")


def test_file_formats_give_the_same_rows(load, tokenizer, tmp_path):
    rows = [{"question": f"{i}?", "answer": f"It is {i}."} for i in range(4)]
    Dataset.from_list(rows).to_parquet(tmp_path / "source.parquet")
    csv = "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows)
    files = {
        "a.jsonl": lines(*rows),
        "a.json": json.dumps(rows).encode(),
        "a.csv": csv.encode(),
        "a.parquet": (tmp_path / "source.parquet").read_bytes(),
    }
    for name, contents in files.items():
        for streaming in (False, True):
            loaders = load(contents, name=name, packing=False, streaming=streaming)
            assert answers(loaders, tokenizer) == [row["answer"] for row in rows], name
    loaders = load(b"one line\nanother\n", name="a.txt", packing=False)
    assert answers(loaders, tokenizer) == ["one line", "another"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("name", "pack"),
    [("train.jsonl.gz", gzip.compress), ("train.tsv.bz2", bz2.compress), ("train.json.xz", lzma.compress)],
)
def test_a_packed_file_is_read_as_what_is_in_it(load, tokenizer, tmp_path, name, pack, folder, streaming):
    rows = [{"question": "a?", "answer": "007"}, {"question": "b?", "answer": "NA"}]
    contents = {
        ".jsonl": lines(*rows[:1]) + b"{broken\n" + lines(*rows[1:]),
        ".tsv": b"question\tanswer\n" + b"".join(f"{r['question']}\t{r['answer']}\n".encode() for r in rows),
        ".json": json.dumps(rows).encode(),
    }[Path(name).with_suffix("").suffix]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(pack(contents))
    path = str(tmp_path / "set" / name if not folder else tmp_path / "set")
    loaders = load(dataset_name=path, split_name="train", packing=False, streaming=streaming)
    assert answers(loaders, tokenizer) == ["007", "NA"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("train.jsonl", lines({"text": "first"}, {"text": "second"})),
        ("train.txt", b"first\nsecond\n"),
        ("train.csv", b"text,id\nfirst,1\nsecond,2\n"),
        ("train.json", json.dumps([{"text": "first"}, {"text": "second"}]).encode()),
    ],
    ids=["jsonl", "txt", "csv", "json"],
)
def test_a_byte_order_mark_is_no_part_of_the_first_row(
    load, tokenizer, tmp_path, name, contents, folder, streaming
):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(codecs.BOM_UTF8 + contents)
    path = str(tmp_path / "set" / name if not folder else tmp_path / "set")
    loaders = load(dataset_name=path, split_name="train", packing=False, streaming=streaming)
    found = [answer.removesuffix(tokenizer.eos_token) for _, answer in texts(loaders, tokenizer)]
    assert found == ["first", "second"]


@pytest.mark.parametrize("streaming", [False, True])
def test_faulty_rows_are_counted_and_left_out(load, tokenizer, streaming):
    contents = (
        lines(PAIR)
        + b'{"problem": "bad \xff\xfe bytes", "generated_solution": "x"}\n'
        + b'{"problem": "lone \\ud800 surrogate", "generated_solution": "x"}\n'
        + b'{"problem": "cut off\n\n[1, 2]\n'
        + lines({"problem": "p", "generated_solution": None}, {"problem": "p", "generated_solution": 5})
        + lines(
            {"problem": "p", "generated_solution": " "},
            {"problem": "p"},
            {"problem": "", "generated_solution": "x"},
        )
        + lines({"problem": "p", "generated_solution": "so " * 200})
        + lines({**PAIR, "generated_solution": "It is two."})
    )
    loaders = load(contents, max_seq_length=128, packing=False, streaming=streaming)
    assert answers(loaders, tokenizer) == ["It is 2.", "5", "It is two."]
    report = loaders.report
    assert (report.rows, report.used, report.bad_rows, report.empty, report.overlong_dropped) == (
        13,
        3,
        6,
        3,
        1,
    )
    shown = " ".join(report.lines())
    assert "3 of 13 rows" in shown and "3 empty" in shown and "1 over --max_seq_length, dropped" in shown
    assert report.as_dict()["bad_rows"] == 6 and "(line 2: what the user says is not UTF-8)" in shown


@pytest.mark.parametrize("streaming", [False, True])
def test_a_line_nested_too_deeply_costs_one_row(load, tokenizer, streaming):
    loaders = load(b"[" * 100_000 + b"\n" + lines(PAIR), packing=False, streaming=streaming)
    assert answers(loaders, tokenizer) == ["It is 2."]
    assert (loaders.report.rows, loaders.report.bad_rows) == (2, 1)


def test_overlong_rows_are_cut_on_request(load, tokenizer):
    rows = [
        {"prompt": "p", "completion": "so " * 200},
        {"prompt": "so " * 200, "completion": "answer"},
        {"prompt": "p", "completion": "q"},
    ]
    loaders = load(lines(*rows), overlong="truncate", max_seq_length=64, packing=False, system_prompt="")
    report = loaders.report
    # The second row's answer lies beyond the cut.
    assert (report.used, report.overlong_truncated, report.without_label) == (2, 1, 1)
    assert report.rows == report.used + report.without_label
    (text, answer), _ = texts(loaders, tokenizer)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 64 and set(answer.split()) == {"so"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_long_texts_are_split_without_losing_a_token(load, tokenizer, packing, streaming):
    # Counting makes every piece of two tokens recognisable.
    documents = [
        " ".join(str(n) for n in range(100 * i, 100 * i + count)) for i, count in enumerate((3, 40, 1, 90))
    ]
    loaders = load(
        lines(*({"text": d} for d in documents)), max_seq_length=24, packing=packing, streaming=streaming
    )
    assert (loaders.report.used, loaders.report.overlong_dropped) == (4, 0)
    pieces = {row: [] for row in range(4)}
    for batch in loaders.train:
        ids, at = batch.inputs["input_ids"][0].tolist(), 0
        cu_seqlens = batch.inputs.get("cu_seqlens", [0, batch.real_tokens])
        for row, end in zip(batch.sample_ids, cu_seqlens[1:], strict=False):
            pieces[row].append(ids[at : int(end)])
            at = int(end)
    for row, document in enumerate(documents):
        whole = tokenizer(document)["input_ids"] + [tokenizer.eos_token_id]
        starts = {}
        for piece in pieces[row]:
            assert len(piece) <= 24
            [start] = [i for i in range(len(whole)) if whole[i : i + len(piece)] == piece]
            starts[start] = piece
        assert list(chain.from_iterable(starts[i] for i in sorted(starts))) == whole


def test_a_token_that_pads_and_ends_keeps_its_loss(load, tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    for packing in (False, True):
        [batch] = load(lines({"text": "two words"}), packing=packing, max_seq_length=64).train
        labels = batch.inputs["labels"][0]
        assert labels[labels != IGNORE][-1] == tokenizer.eos_token_id
        assert batch.label_tokens == batch.real_tokens - 1
        assert set(batch.inputs["input_ids"][0, batch.real_tokens :].tolist()) == {tokenizer.eos_token_id}


NO_ROWS = BytesIO()
pd.DataFrame({"text": []}, dtype=str).to_parquet(NO_ROWS)
USABLE = lines(*[{"text": f"row {i}"} for i in range(3)])
ERRORS = {
    "unknown split": (
        USABLE,
        {"split_name": "validation"},
        r"--split_name validation: no such split.*there are: train$",
    ),
    "unknown evaluation split": (
        USABLE,
        {"eval_split": "dev", "eval_samples": 1},
        r"--eval_split dev: no such split.*: train$",
    ),
    "training split as evaluation split": (
        USABLE,
        {"eval_split": "train"},
        "--eval_split train: is the training split",
    ),
    "training split by its other name as evaluation split": (
        USABLE,
        {"dataset_name": "demo", "split_name": "train_1M", "eval_split": "train"},
        "--eval_split train: is the training split",
    ),
    "no such text column": (
        USABLE,
        {"dataset_text_field": "body"},
        "--dataset_text_field body: there is no such column.*text",
    ),
    "no such prompt column": (
        USABLE,
        {"dataset_prompt_field": "text", "dataset_completion_field": "b"},
        "--dataset_completion_field b: there is no such column.*text",
    ),
    "no known columns": (
        lines({"x": "1", "y": "2"}),
        {},
        r"--dataset_name .*--dataset_text_field.*\(columns .*: x, y\)",
    ),
    "an empty file": (b"", {"name": "a.jsonl"}, "--dataset_name .*: a.jsonl is empty"),
    "a cache that is a file": (
        USABLE,
        {"data_cache_dir": __file__},
        "--data_cache_dir .*: File exists; choose a folder you can write to",
    ),
    "no rows": (b"text\n", {"name": "a.csv"}, "--dataset_name .*(no rows|cannot be read)"),
    "no usable rows": (
        lines({"text": ""}, {"text": 5}),
        {},
        "--split_name train .*no row can be used .1 empty, 1 bad",
    ),
    "all overlong": (
        lines(PAIR),
        {"max_seq_length": 8},
        r"\(1 overlong\); raise --max_seq_length 8, add --overlong truncate,",
    ),
    "a list called lines": (
        json.dumps([PAIR], indent=2).encode(),
        {},
        r"rows.jsonl: line 1 is not valid JSON; give one JSON object a line, in UTF-8",
    ),
    "lines in UTF-16": (
        lines(PAIR).decode().encode("utf-16"),
        {},
        "rows.jsonl: line 1 is not valid JSON; give",
    ),
    "text called lines": (b"\n\nsome text\n", {}, "rows.jsonl: line 3 is not valid JSON; give"),
    "blank lines": (b"\n \n\n", {}, "rows.jsonl: line 1 is blank, and so are all others; give"),
    "an empty packed file": (
        gzip.compress(b""),
        {"name": "a.jsonl.gz"},
        "--dataset_name .*: a.jsonl.gz is empty",
    ),
    "an empty packed table": (
        lzma.compress(b""),
        {"name": "a.csv.xz"},
        "--dataset_name .*: a.csv.xz is empty",
    ),
    "a packed file without a byte": (b"", {"name": "a.txt.bz2"}, "--dataset_name .*: a.txt.bz2 is empty"),
    "a packed file that is cut": (
        bz2.compress(USABLE)[:-9],
        {"name": "a.jsonl.bz2"},
        "--dataset_name .*a.jsonl.bz2: cannot be read: Compressed file ended .*; check that it is whole",
    ),
    "a damaged packed file": (
        gzip.compress(USABLE)[:-8] + bytes(8),
        {"name": "a.jsonl.gz"},
        "--dataset_name .*a.jsonl.gz: cannot be read: CRC check failed",
    ),
    "a packed file that is not": (
        USABLE,
        {"name": "a.jsonl.xz"},
        "a.jsonl.xz: cannot be read: Input format not",
    ),
    "a parquet file without rows": (
        NO_ROWS.getvalue(),
        {"name": "a.parquet"},
        "--dataset_name .*a.parquet: a .parquet file has no rows; leave it out",
    ),
    "not a data file": (b"x", {"name": "a.pkl"}, r"--dataset_name .*a.pkl: not a data file.*\.jsonl"),
    "broken file": (b"PAR1 not parquet", {"name": "a.parquet"}, "--dataset_name .*a.parquet: cannot be read"),
    "too long for the model": (
        USABLE,
        {"max_seq_length": 4096},
        "--max_seq_length 4096: --model_name has 2048 positions",
    ),
    "no such file": (
        b"",
        {"dataset_name": "no/rows.jsonl"},
        "--dataset_name no/rows.jsonl: there is no such file",
    ),
    "a file with a configuration": (
        b"",
        {"dataset_name": f"{__file__}:main"},
        f"--dataset_name {__file__}:main: a file has no configurations; give {__file__}$",
    ),
    "no such folder": (
        b"",
        {"dataset_name": "/no/such/folder"},
        "--dataset_name /no/such/folder: cannot be read.*demo",
    ),
    "out of reach": (
        b"",
        {"dataset_name": "no-such-owner/no-such-set"},
        "--dataset_name no-such-owner/no-such-set: cannot be read.*demo",
    ),
    "demo has no such split": (
        b"",
        {"split_name": "validation"},
        "--split_name validation: .*train_1M, test",
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("contents", "settings", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_flag_and_the_way_out(load, contents, settings, message, streaming, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message) as info:
        load(contents, streaming=streaming, **settings)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_cannot_be_read_further_is_one_line(load, tmp_path, num_workers):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train-0.jsonl").write_bytes(USABLE * 400)
    (tmp_path / "set" / "train-1.jsonl.gz").write_bytes(gzip.compress(USABLE)[:-9])
    settings = {"dataset_name": str(tmp_path / "set"), "split_name": "train", "num_workers": num_workers}
    loaders = load(**settings, streaming=True)
    with pytest.raises(
        RuntimeError, match=r"cannot be read: Compressed file ended .* last checkpoint$"
    ) as info:
        list(loaders.train)
    assert "\n" not in str(info.value)


def test_a_cache_that_is_full_is_told_by_an_item_of_the_stream_too():
    class Full:
        layout = None

        def members(self, epoch, position):
            raise NotStored("No space left on device; make room there")

    (told,) = StreamItems(Full(), 0, [0])
    assert str(told).startswith("No space left") and str(told).endswith("from the last checkpoint")


def test_streamed_evaluation_rows_that_cannot_be_read_are_one_line(load, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(USABLE)
    (tmp_path / "set" / "test.jsonl.gz").write_bytes(gzip.compress(USABLE)[:-9])
    settings = {"dataset_name": str(tmp_path / "set"), "split_name": "train", "eval_split": "test"}
    with pytest.raises(ValueError, match="cannot be read: Compressed file ended"):
        load(**settings, eval_samples=2, streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_evaluation_split_is_told_before_rows_are_tokenised(load, monkeypatch, streaming):
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(ValueError, match="--eval_split dev: no such split"):
        load(USABLE, eval_split="dev", eval_samples=1, streaming=streaming)


CONFIGURATIONS = ("main", "socratic")


@pytest.fixture(params=["jsonl", "parquet"])
def configured(request, tmp_path):
    """A folder of two configurations."""
    folder = tmp_path / "set"
    folder.mkdir()
    card = "configs:\n"
    for name in CONFIGURATIONS:
        rows = [{"question": "1?", "answer": f"{name} {i}"} for i in range(3)]
        path = folder / f"{name}.{request.param}"
        if request.param == "parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_bytes(lines(*rows))
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {path.name}\n"
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_one_of_several_configurations(load, tokenizer, configured, name, streaming):
    settings = {"split_name": "train", "packing": False, "streaming": streaming}
    loaders = load(dataset_name=f"{configured}:{name}", **settings)
    assert answers(loaders, tokenizer) == [f"{name} {i}" for i in range(3)]
    aside = configured.rename(configured.with_name(f"set:{name}"))  # a path that exists is taken as written
    with pytest.raises(ValueError, match=f"{aside}: has several configurations"):
        load(dataset_name=str(aside), **settings)


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [("", "has several configurations"), (":nope", "there is no configuration nope")],
)
def test_a_configuration_that_is_not_named_right_lists_them(load, configured, suffix, reason):
    message = (
        f"--dataset_name {configured}{suffix}: {reason}; .*{configured}:main; there are: main, socratic$"
    )
    with pytest.raises(ValueError, match=message):
        load(dataset_name=f"{configured}{suffix}", split_name="train")


def test_the_default_cache_is_checked_too(load, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    with pytest.raises(
        ValueError,
        match=r"^the Hugging Face cache .*file/datasets: Not a directory; give --data_cache_dir a folder you",
    ):
        load(USABLE, data_cache_dir=None)


ROOM = "make room there, or choose a folder you can write to$"


@pytest.fixture
def stored(load, tmp_path):
    """A file whose rows are in the cache, but not their tokens."""
    (tmp_path / "rows.jsonl").write_bytes(USABLE)
    settings = {"dataset_name": str(tmp_path / "rows.jsonl"), "split_name": "train"}
    detect(DataConfig(**settings, data_cache_dir=str(tmp_path / "cache")), "train")
    return settings


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("processes", [0, 1, 2])  # that tokenise; 0: rows are not stored yet
def test_a_cache_that_cannot_be_written_is_named(load, stored, tmp_path, monkeypatch, number, processes):
    closed = [f"{tmp_path}/cache/file"] if number in cache.CLOSED else []

    def write_table(*_):
        raise OSError(number, os.strerror(number), *closed)

    monkeypatch.setattr(ArrowWriter, "write_table", write_table)
    way_out = "choose a folder you can write to$" if closed else ROOM
    message = f"^--data_cache_dir {tmp_path}/cache: {os.strerror(number)}; {way_out}"
    with pytest.raises(RuntimeError, match=message):
        load(**stored, num_proc=processes) if processes else load(USABLE, name="others.jsonl")
    assert not list((tmp_path / "cache").rglob("tmp*"))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_tokens_that_are_cut_off_are_made_again(load, stored, tmp_path, caplog, keep, processes):
    whole = load(**stored, num_proc=processes).train.identity
    file = sorted((tmp_path / "cache").glob("tokenise_*/cache-*.arrow"))[-1]
    contents = file.read_bytes()
    file.write_bytes(contents[: int(keep * len(contents))])
    assert load(**stored, num_proc=processes).train.identity == whole
    assert caplog.text.count(f"{file}: is cut off; deleted, and its rows are tokenised again") == 1
    assert file.read_bytes() == contents
    load(**stored, num_proc=processes)
    assert caplog.text.count("is cut off") == 1


def first_batch(file: Path) -> bytes:
    """An Arrow file up to the end of its first batch."""
    with pa.memory_map(str(file)) as mapped:
        pa.ipc.open_stream(mapped).read_next_batch()
        return mapped.read_at(mapped.tell(), 0)


def test_tokens_that_are_cut_between_two_batches_are_made_again(load, tmp_path, caplog):
    settings = {"dataset_name": str(tmp_path / "rows.jsonl"), "split_name": "train"}
    whole = load(lines(*[{"text": f"row {i}"} for i in range(1500)])).train.identity
    (file,) = (tmp_path / "cache").glob("tokenise_*/cache-*.arrow")
    file.write_bytes(first_batch(file))
    assert len(Dataset.from_file(str(file))) == 1000, "read without an error"
    assert load(**settings).train.identity == whole and "is cut off" in caplog.text


@pytest.mark.parametrize("keep", [None, 0.0, 0.5, "a batch"])
@pytest.mark.parametrize("set_", ["file", "demo"])
def test_stored_rows_that_are_cut_off_are_named_with_what_to_delete(load, request, tmp_path, set_, keep):
    settings = request.getfixturevalue("stored") if set_ == "file" else {}
    load(**settings)
    (file,) = (tmp_path / "cache").rglob("*-train.arrow")
    whole = file.read_bytes()
    if keep is None:
        file.unlink()
    else:
        file.write_bytes(first_batch(file) if keep == "a batch" else whole[: int(keep * len(whole))])
    message = f"{file}: stored rows that are cut off or missing; delete the folder {file.parent}, and they"
    with pytest.raises(RuntimeError, match=re.escape(message)) as info:
        load(**settings)
    assert "\n" not in str(info.value)
    shutil.rmtree(file.parent)
    load(**settings)


def test_datasets_that_would_not_fit_are_told_apart_from_those_out_of_reach(load, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.builder, "has_sufficient_disk_space", lambda *_, **__: False)
    with pytest.raises(RuntimeError, match=f"^--data_cache_dir {tmp_path}/cache: Not enough disk .*; {ROOM}"):
        load(USABLE)


def test_the_demo_set_needs_room_too(load, tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowWriter, "write", write)
    with pytest.raises(RuntimeError, match=f"^--data_cache_dir {tmp_path}/cache: No space left .*; {ROOM}"):
        load()


def test_another_full_disk_is_not_told_of_the_cache(tmp_path):
    cfg = DataConfig(data_cache_dir=str(tmp_path / "cache"))
    elsewhere = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/sem.mp-1")
    said = str(cache.why_not_stored(cfg, elsewhere))
    assert said.endswith("No space left on device: '/dev/shm/sem.mp-1'; make room there")
    assert "--data_cache_dir" not in said


def test_a_socket_that_may_not_be_opened_is_the_networks():
    refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
    said = str(unreadable(DataConfig(dataset_name="owner/set"), refused))
    assert "check the name and the network" in said and "permissions" not in said


def test_downloads_need_room_in_a_folder_of_their_own(load, monkeypatch):
    def hf_hub_download(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.file_download, "_hf_hub_download_to_cache_dir", hf_hub_download)
    monkeypatch.setattr(
        datasets,
        "load_dataset_builder",
        lambda *_, **__: huggingface_hub.hf_hub_download("owner/set", "rows.jsonl"),
    )
    with pytest.raises(
        RuntimeError, match=r"^the download cache .*: No space left .*; make room there, or set HF_HUB_CACHE"
    ):
        load(dataset_name="owner/set", split_name="train")


@pytest.mark.parametrize("number", cache.CLOSED)
def test_rows_that_may_not_be_read_say_so(load, tmp_path, monkeypatch, number):
    def generate(*_, **__):
        raise OSError(number, os.strerror(number), "rows.jsonl")
        yield

    monkeypatch.setattr(Text, "_generate_tables", generate)
    with pytest.raises(
        ValueError, match=rf"cannot be read: .*{os.strerror(number)}: 'rows.jsonl'; check the permissions$"
    ):
        load(USABLE)


def test_a_tokenising_process_that_is_killed_leaves_no_file(load, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(ArrowWriter, "write_table", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    (folder,) = {path.parent for path in (tmp_path / "cache").rglob("*.arrow")}
    (folder / "tmp_of_another").touch()
    with pytest.raises(
        RuntimeError, match=r"^--num_proc 2: a tokenising process was killed.*lower --num_proc$"
    ):
        load(**stored, num_proc=2)
    assert [path.name for path in (tmp_path / "cache").rglob("tmp*")] == ["tmp_of_another"]


@pytest.mark.parametrize("set_", ["file", "demo"])
def test_an_interrupt_that_datasets_hides_stays_one(load, monkeypatch, set_):
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    def hidden(*_):
        raise SchemaInferenceError("no rows")

    monkeypatch.setattr(Text, "_generate_tables", interrupted)
    monkeypatch.setattr(Generator, "_generate_examples", interrupted)
    monkeypatch.setattr(ArrowWriter, "finalize", hidden)
    with pytest.raises(KeyboardInterrupt):
        load(USABLE if set_ == "file" else b"")


def test_a_held_out_part_that_cannot_be_used_leaves_a_run_without_evaluation(load, caplog):
    rows = [{"text": f"{i} is a number. " * 4} for i in range(10)]
    for i in range(10):  # whichever row is held out
        loaders = load(lines(*(row if j != i else {"text": 5} for j, row in enumerate(rows))), eval_samples=1)
        assert (loaders.eval is None) == ("none of the 1 held-out rows can be used" in caplog.text)
        if loaders.eval is None:
            return
    raise AssertionError("no row was held out")


def test_a_system_prompt_is_not_asked_of_a_template_that_never_gets_it(load, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|start_header_id|>{{ m['role'] }}<|end_header_id|>{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    turns = [{"role": "user", "content": "a", "calls": None}, {"role": "assistant", "content": "b"}]
    loaders = load(lines(*[{"messages": turns}] * 3), packing=False)
    assert answers(loaders, tokenizer) == ["b"] * 3
    with pytest.raises(ValueError, match="no system; try --system_prompt ''"):
        load(lines(*[{"problem": "a", "solution": "b"}] * 3), name="pairs.jsonl")


def test_a_template_that_never_ends_an_answer_is_told_once(load, tokenizer, caplog):
    tokenizer.chat_template = (
        "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% endif %}"
    )
    load(lines(*[{"problem": "a", "solution": "b"}] * 3), packing=False)
    assert caplog.text.count("nothing in training shows the model where to stop") == 1
    caplog.clear()
    load(USABLE, name="texts.jsonl")
    assert "where to stop" not in caplog.text, "plain text ends with the tokenizer's own token"


def test_padding_is_a_token_that_the_model_has(load, tokenizer):
    tokenizer.add_special_tokens({"pad_token": "<pad>"})  # past the model's embedding
    loaders = load(USABLE, packing=False)
    assert tokenizer.pad_token_id == VOCABULARY
    assert all(int(batch.inputs["input_ids"].max()) < VOCABULARY for batch in loaders.train)


def test_a_stream_shorter_than_its_evaluation_part(load):
    with pytest.raises(ValueError, match=r"no rows after the 5 held out.*--eval_samples"):
        load(USABLE, streaming=True, eval_samples=5)


def test_only_the_files_of_the_split_are_read(tmp_path):
    (tmp_path / "set").mkdir()
    Dataset.from_list([PAIR]).to_parquet(tmp_path / "set" / "train.parquet")
    (tmp_path / "set" / "test.parquet").write_bytes(b"not to be read")
    cfg = DataConfig(dataset_name=str(tmp_path / "set"), data_cache_dir=str(tmp_path / "cache"))
    assert list(detect(cfg, "train").rows) == [PAIR]
