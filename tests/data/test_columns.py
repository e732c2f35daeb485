"""Column detection, and conversion of rows to samples."""

import json
import math
import re
from itertools import chain

import pytest
from datasets import Dataset
from fp8_suite.core.errors import UserError
from fp8_suite.data.reading.columns import KNOWN_COLUMNS, choose_columns
from fp8_suite.data.reading.rows import ROLE_ALIASES, ROLES, TOOLS, Status, arrow_row, json_line, judge
from fp8_suite.data.settings import SYSTEM_PROMPT, DataConfig

PAIR = {"problem": "What is 1 + 1?", "generated_solution": "It is 2."}
CHAT = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."}]
SHARE_GPT = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "One."}]
PARTS = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
UNKNOWN = "unknown role 'AI'; known are " + ", ".join([*ROLES, *ROLE_ALIASES])
ANSWER, ROLE = "the content of the assistant", "the role of a message"
WEIGHT = "the weight of the assistant"
PIRATE = {"role": "system", "content": "Answer like a pirate."}
TOOL = {"type": "function", "function": {"name": "weather", "required": ["1"]}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}


def columns_of(*rows, **settings):
    return choose_columns(DataConfig(**settings), list(dict.fromkeys(chain(*rows))), rows)


def convert(row, **settings):
    return columns_of(row, **settings).to_sample(row)


@pytest.mark.parametrize(("kind", "fields"), KNOWN_COLUMNS)
def test_known_columns_are_detected(kind, fields):
    row = dict.fromkeys(["id", *fields], "x")
    columns = columns_of(row)
    assert columns.chat == (kind != "text") and columns.shown.startswith(" -> ".join(fields))


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (PAIR, PAIR["problem"], PAIR["generated_solution"]),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2", "3"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add.", "3"),
        ({"instruction": "Add.", "context": ["1", None, 2], "response": "3"}, "Add.\n\n1\n\n2", "3"),
        ({"instruction": "Add.", "context": {"id": 7}, "response": "3"}, "Add.", "3"),
        ({"instruction": "Double it.", "input": 21, "output": 42.5}, "Double it.\n\n21", "42.5"),
        ({"input": CHAT[:1], "output": "One."}, "1?", "One."),  # NVIDIA's Nemotron sets
    ],
)
def test_prompt_and_answer_become_a_chat(row, prompt, answer):
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    assert convert(row, system_prompt="") == {"messages": turns}
    with_system = [{"role": "system", "content": "Think."}, *turns]
    assert convert(row, system_prompt="Think.") == {"messages": with_system}


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"messages": CHAT}, {}),
        ({"messages": PARTS}, {}),
        ({"messages": [turn | {"tool_calls": None} for turn in CHAT]}, {}),  # null keys, as read from Parquet
        ({"conversations": SHARE_GPT}, {}),
        ({"turns": CHAT, "messages": []}, {"dataset_text_field": "turns"}),
        ({"turns": json.dumps(CHAT)}, {"dataset_text_field": "turns"}),
        ({"messages": json.dumps(CHAT)}, {}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}),
    ],
)
def test_all_chat_formats_are_read(row, settings):
    assert convert(row, **settings) == {"messages": CHAT}
    begun = [{"role": "system", "content": "Own."}, *CHAT]
    assert convert({"messages": begun}, system_prompt="Be short.") == {"messages": begun}
    with_system = [{"role": "system", "content": "Be short."}, *CHAT]
    assert convert(row, system_prompt="Be short.", **settings) == {"messages": with_system}


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_assistant_turns_before_the_first_prompt_are_dropped(system):
    greeting = {"from": "gpt", "value": "How can I help?"}
    begun = [{"role": "system", "content": system}] if system else []
    for leading in ([greeting], [greeting, greeting]):
        row = {"conversations": [*leading, *SHARE_GPT]}
        assert convert(row, system_prompt=system) == {"messages": [*begun, *CHAT]}
    answered = [{"role": "system", "content": "You begin."}, CHAT[1], *CHAT]
    assert convert({"messages": answered}, system_prompt=system) == {"messages": answered}


def test_senders_of_share_gpt_and_its_derivatives_become_roles():
    senders = ("human", "gpt", "prompter", "bot", "observation", "model")
    sample = convert({"conversations": [{"from": sender, "value": "x"} for sender in senders]})
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in sample["messages"]] == roles
    same = convert({"messages": [{"role": "human", "content": "1?"}, {"role": "gpt", "content": "One."}]})
    assert same == {"messages": CHAT}


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"system_prompt": PIRATE["content"], "question": "1?", "response": "One."}, [PIRATE]),
        ({"system": PIRATE["content"], "conversations": SHARE_GPT}, [PIRATE]),
        ({"system": PIRATE["content"], "messages": [{"role": "system", "content": "Be brief."}, *CHAT]},
         [{"role": "system", "content": "Be brief."}]),
        ({"system": "", "messages": CHAT}, [{"role": "system", "content": "By default."}]),
        ({"instruction": "1?", "output": "One.", "system": PIRATE["content"], "history": [["1?", "One."]]},
         [PIRATE, *CHAT]),
        ({"prompt": "1?", "completion": "One.", "history": json.dumps(CHAT)},
         [{"role": "system", "content": "By default."}, *CHAT]),
    ],
)  # fmt: skip
def test_system_and_history_columns_come_before_the_chat(row, before):
    assert convert(row, system_prompt="By default.") == {"messages": [*before, *CHAT]}


@pytest.mark.parametrize("form", [json.dumps, lambda value: value], ids=["JSON", "object"])
def test_template_options_of_a_row_are_kept(form):
    row = {"messages": CHAT, "chat_template_kwargs": form({"enable_thinking": False})}
    assert convert(row) == {"messages": CHAT, "options": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("row", "is_math"),
    [(PAIR, True), ({"instruction": "Translate.", "output": "chat"}, False), ({"messages": CHAT}, False)],
)
def test_default_system_prompt_is_only_for_math_problems(row, is_math):
    systems = [m["content"] for m in convert(row)["messages"] if m["role"] == "system"]
    assert systems == ([SYSTEM_PROMPT] if is_math else [])
    assert columns_of(row).system == (SYSTEM_PROMPT if is_math else "")


@pytest.mark.parametrize(
    ("columns", "settings", "shown"),
    [
        ("instruction input output text id", {}, "instruction and input -> output, .*; not used: text, id"),
        ("messages tools system history", {}, "messages and tools .* of system.*; not used: history"),
        ("a messages", {"dataset_text_field": "a"}, "a .*; not used: messages"),
        ("prompt response", {"system_prompt": "Be\n short."}, 'prompt -> response, .* "Be short."'),
    ],
)
def test_report_shows_columns_in_use_and_names_the_others(columns, settings, shown):
    assert re.fullmatch(shown, columns_of(dict.fromkeys(columns.split(), "x"), **settings).shown)


@pytest.mark.parametrize("settings", [{"dataset_text_field": "body"}, {}], ids=["given", "detected"])
def test_error_for_missing_columns_lists_existing_ones(settings):
    with pytest.raises(UserError, match=r"--dataset_.* x, y"):
        columns_of({"x": 1, "y": 2}, **settings)


def sample_with_tools(tools, calls, **content):
    turns = [CHAT[0], {"role": "assistant", "tool_calls": calls, **content}]
    return convert({"messages": turns, "tools": tools})


@pytest.mark.parametrize("written", [json.dumps, lambda value: value], ids=["JSON", "objects"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["no", "null", "empty"])
def test_tools_and_calls_are_read_as_json_or_objects(written, content):
    function = {**CALL["function"], "arguments": written(CALL["function"]["arguments"])}
    sample = sample_with_tools(written([TOOL]), [CALL | {"function": function}], **content)
    assert sample["tools"] == [TOOL]
    assert sample["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert judge(sample)[0] == Status.USED
    of_one_call = sample_with_tools(None, written(CALL), **content)
    assert of_one_call["messages"] == sample["messages"], "a single call becomes a list"


@pytest.mark.parametrize("none", [None, "", "null", "[]", "{}", [], {}])
def test_empty_tools_are_dropped(none):
    sample = sample_with_tools(none, none, content="I look.")
    assert sample == {"messages": [CHAT[0], {"role": "assistant", "content": "I look."}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"history": "earlier"}, "its history is not a list of prompts"),
        ({"completion": [CHAT[1] | {"tool_calls": "search"}]}, "the tool calls of the assistant are not"),
        ({"system": ["a"]}, "the content of the system is of type list, not text"),
    ],
)
def test_malformed_parts_of_a_conversation_make_a_bad_row(change, reason):
    status, shown = judge(convert({"prompt": "1?", "completion": "One."} | change))
    assert status == Status.BAD and shown.startswith(reason)


def test_nulls_added_by_arrow_are_dropped_but_explicit_nulls_stay():
    search = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    rows = [{"messages": [CHAT[1] | {"tool_calls": [call]}], TOOLS: [call]} for call in (CALL, search)]
    stored = Dataset.from_list(rows)
    to_sample = choose_columns(DataConfig(), stored.column_names, stored).to_sample
    assert stored[0][TOOLS][0]["function"]["arguments"] == {"place": "Oslo", "query": None}
    assert [arrow_row(to_sample, row) for row in stored] == rows
    null = {"type": "function", "function": {"name": "weather", "arguments": {"place": None}}}
    row = {"messages": [CHAT[1] | {"tool_calls": [null]}], TOOLS: [null]}
    assert json_line(to_sample, {"text": json.dumps(row)}) == row


@pytest.mark.parametrize(
    ("sample", "status", "reason"),
    [
        ({"text": "ok"}, Status.USED, ""),
        ({"text": " \n"}, Status.EMPTY, ""),
        ({"text": None}, Status.BAD, "its text is missing, not text"),
        ({"text": "bad \ufffd byte"}, Status.BAD, "its text is not UTF-8"),
        ({"messages": [{"role": "system", "content": ""}, *CHAT]}, Status.USED, ""),
        ({"messages": []}, Status.EMPTY, ""),
        ({"messages": CHAT[:1]}, Status.WITHOUT_LABEL, ""),
        ({"messages": [CHAT[0], CHAT[1] | {"content": ""}]}, Status.EMPTY, ""),
        ({"messages": [{"role": None, "content": "a"}]}, Status.BAD, f"{ROLE} is missing, not text"),
        ({"messages": ["hello"]}, Status.BAD, "its messages are not a list of messages"),
        (convert({"conversations": [{"from": ["human"]}]}), Status.BAD, f"{ROLE} is of type list, not text"),
        (convert({"query": "?", "response": math.nan}), Status.BAD, f"{ANSWER} is of type float, not text"),
        (convert({"question": "?", "answer": 10**400}), Status.USED, ""),
        (json_line(convert, {"text": "{cut"}), Status.BAD, "not valid JSON"),
        (json_line(convert, {"text": "[1]"}), Status.BAD, "not a JSON object"),
        (json_line(convert, {"text": " "}), Status.BLANK, ""),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}, Status.WITHOUT_LABEL, ""),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": "0"}]}, Status.BAD, f"{WEIGHT} is '0', not 0 or 1"),
        ({"messages": [CHAT[0], {"role": "AI", "content": "One."}]}, Status.BAD, UNKNOWN),
    ],
)  # fmt: skip
def test_unusable_samples_get_status_and_reason(sample, status, reason):
    assert judge(sample) == (status, reason)
