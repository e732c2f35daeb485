"""Templates, prompts as at inference, and which tokens carry loss."""

from __future__ import annotations

import json
import zlib
from itertools import islice

import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from data.chat import CHATML, LLAMA3, MISTRAL, Encoder, Status, load_tokenizer, turn_end, why_unusable
from data.demo import TOKENIZER_DIR, generate
from training.checkpoint.generate import reads_back

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 3? "},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 3 + 4?"},
    {"role": "assistant", "content": "It is 7."},
]
LLAMA3_CHAT = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 3?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 5.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 3 + 4?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 7.<|eot_id|>"
)
CHATML_CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What is 2 + 3? <|im_end|>\n"
    "<|im_start|>assistant\nIt is 5.<|im_end|>\n<|im_start|>user\nAnd 3 + 4?<|im_end|>\n"
    "<|im_start|>assistant\nIt is 7.<|im_end|>\n"
)
MISTRAL_CHAT = (
    "<|begin_of_text|>[INST] Be brief.\n\nWhat is 2 + 3?[/INST] It is 5.<|eot_id|>"
    "[INST] And 3 + 4?[/INST] It is 7.<|eot_id|>"
)
# Only the last answer keeps its reasoning, as in Qwen3.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def as_is(row):
    return row


def encoder(tokenizer, *, chat=True, system=""):
    return Encoder(tokenizer, as_is, chat=chat, system=system)


def encode(tokenizer, sample):
    rows = encoder(tokenizer, chat="messages" in sample).encode([sample], [0]).to_pylist()
    return [(row["input_ids"], np.reshape(row["spans"], (-1, 2)).tolist()) for row in rows]


def with_loss(tokenizer, sample):
    """Decoded text of each span."""
    return [tokenizer.decode(ids[a:b]) for ids, spans in encode(tokenizer, sample) for a, b in spans]


@pytest.fixture
def demo():
    return load_tokenizer("demo", family="llama")


@pytest.fixture
def chatml(tmp_path):
    """A tokenizer without BOS, pad token or template, with ChatML's markers, as Qwen's base models have."""
    tokenizer = load_tokenizer("demo", family="llama")
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "qwen")
    return load_tokenizer(str(tmp_path / "qwen"), family="qwen2")


def test_llama3_rendering_is_exact(demo):
    demo.chat_template = LLAMA3.text
    assert encoder(demo).render(CHAT) == LLAMA3_CHAT
    prompt = encoder(demo).render(CHAT[:2], generate=True)
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert prompt == LLAMA3_CHAT[: LLAMA3_CHAT.index(header) + len(header)]


def test_chatml_is_set_where_the_tokenizer_has_no_template(chatml):
    assert chatml.chat_template == CHATML.text
    assert chatml.pad_token == "<|endoftext|>"
    assert encoder(chatml).render(CHAT) == CHATML_CHAT


@pytest.fixture
def mistral(tmp_path):
    """A tokenizer with Mistral's markers and no template, as the base model's has."""
    tokenizer = load_tokenizer("demo", family="llama")
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    tokenizer.save_pretrained(tmp_path / "mistral")
    return load_tokenizer(str(tmp_path / "mistral"), family="mistral")


def test_mistral_is_set_where_the_tokenizer_has_no_template(mistral):
    assert mistral.chat_template == MISTRAL.text
    assert encoder(mistral).render(CHAT) == MISTRAL_CHAT
    assert encoder(mistral).render(CHAT[:2], generate=True) == MISTRAL_CHAT[: MISTRAL_CHAT.index(" It is 5")]
    [(ids, _)] = encode(mistral, {"messages": CHAT})  # one sample: no turn rewrites an earlier one
    assert mistral.decode(ids) == MISTRAL_CHAT
    assert with_loss(mistral, {"messages": CHAT}) == [" It is 5.<|eot_id|>", " It is 7.<|eot_id|>"]
    silent = [{"role": "system", "content": ""}, *CHAT[1:]]
    assert encoder(mistral).render(silent) == encoder(mistral).render(CHAT[1:])


@pytest.mark.parametrize(
    ("messages", "role"),
    [([{"role": "tool", "content": "5"}, *CHAT], "tool"), ([CHAT[0], CHAT[2]], "assistant")],
    ids=["a tool", "a system prompt that no user follows"],
)
def test_mistral_refuses_what_it_has_no_place_for(mistral, messages, role):
    with pytest.raises(TemplateError, match=f"no place for role {role}"):
        encoder(mistral).segments(messages)


def test_a_template_of_its_own_is_kept(demo, tmp_path):
    demo.chat_template = REWRITING
    demo.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), family="llama").chat_template == "{{ bos_token }}" + REWRITING


def test_a_family_template_needs_its_markers(demo, tmp_path):
    demo.chat_template = None
    demo.save_pretrained(tmp_path)
    for family in ("qwen2", "gpt2"):
        tokenizer = load_tokenizer(str(tmp_path), family=family)
        assert tokenizer.chat_template is None
        encoder(tokenizer, chat=False)  # plain text needs none
        with pytest.raises(ValueError, match=r"--tokenizer_name .*no chat template.*--dataset_text_field"):
            encoder(tokenizer)


def test_every_token_is_there_and_every_answer_carries_loss(demo, chatml):
    for tokenizer, text, end in ((demo, LLAMA3_CHAT, "<|eot_id|>"), (chatml, CHATML_CHAT, "<|im_end|>")):
        [(ids, _)] = encode(tokenizer, {"messages": CHAT})
        assert tokenizer.decode(ids) == text
        # The end-of-turn token too, but not the newline that ChatML writes after it.
        assert with_loss(tokenizer, {"messages": CHAT}) == [f"It is 5.{end}", f"It is 7.{end}"]


@pytest.mark.parametrize("template", [LLAMA3.text, CHATML.text])
def test_one_bos_whoever_writes_it(demo, template):
    assert demo("a")["input_ids"][0] == demo.bos_token_id  # this tokenizer adds one by itself
    demo.chat_template = template  # LLAMA3 writes one as well, ChatML none
    [(ids, _)] = encode(demo, {"messages": CHAT})
    assert ids[0] == demo.bos_token_id and ids.count(demo.bos_token_id) == 1


def test_a_template_that_leaves_bos_to_the_tokenizer_gets_it_for_inference(demo, tmp_path):
    demo.chat_template = CHATML.text
    demo.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), family="llama")
    [(ids, spans)] = encode(loaded, {"messages": CHAT[:3]})
    asked = {"add_generation_prompt": True, "return_dict": False, "tokenize": True}
    assert loaded.apply_chat_template(CHAT[:2], **asked) == ids[: spans[0][0]]
    assert ids.count(demo.bos_token_id) == 1 and ids[0] == demo.bos_token_id
    loaded.save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again"), family="llama").chat_template == loaded.chat_template


def test_no_bos_where_neither_writes_one(chatml):
    [(ids, _)] = encode(chatml, {"messages": CHAT})
    assert chatml.convert_ids_to_tokens(ids[0]) == "<|im_start|>"


def test_the_prompt_is_tokenised_as_at_inference(demo, chatml):
    for tokenizer in (demo, chatml):
        [(ids, spans)] = encode(tokenizer, {"messages": CHAT[:3]})
        at_inference = tokenizer.apply_chat_template(
            CHAT[:2], add_generation_prompt=True, return_dict=False, tokenize=True
        )
        assert ids[: spans[0][0]] == at_inference
        prompt, answer = encoder(tokenizer).prompt_and_answer({"messages": CHAT[:3]})
        assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == at_inference
        assert answer == "It is 5."


def piece_by_piece(encoder, samples):
    """What `Encoder.encode` returns, each piece of text tokenised by itself by the tokenizer's own call."""
    rows = []
    for number, sample in enumerate(samples):
        found = [[]] if why_unusable(sample) else encoder.segments(sample["messages"])
        for segments in found:
            ids, spans = [], []
            for text, loss in segments:
                start = len(ids)
                ids += encoder.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
                spans += [start, len(ids)] if loss else []
            crc = zlib.crc32(np.array(ids, dtype=np.int32).tobytes())
            crc = zlib.crc32(np.array(spans, dtype=np.int32).tobytes(), crc)
            status, top = why_unusable(sample), max(ids, default=0)
            rows.append(
                {"input_ids": ids, "spans": spans, "row": number, "status": status, "crc": crc, "top": top}
            )
    return rows


@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_a_batch_is_tokenised_as_each_piece_by_itself(demo, chatml, split_special_tokens):
    problems = [(row["problem"], row["generated_solution"]) for row in islice(generate("test"), 40)]
    pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in problems]
    special = "Say <|eot_id|> or <|im_end|>, \u4e16\u754c!  \n\n\tTwo  spaces"
    odd = [{"role": "user", "content": special}, {"role": "assistant", "content": special}]
    samples = [{"messages": messages} for messages in (*pairs, [], odd, CHAT)]
    for tokenizer in (demo, chatml):
        tokenizer.split_special_tokens = split_special_tokens
        for template in (tokenizer.chat_template, REWRITING):
            tokenizer.chat_template = template
            made = encoder(tokenizer)
            # Such settings may come with a tokenizer.json; the tokenizer's own call does without them.
            tokenizer.backend_tokenizer.enable_truncation(8)
            tokenizer.backend_tokenizer.enable_padding(length=500)
            tokenizer.backend_tokenizer.encode_special_tokens = not split_special_tokens
            table = made.encode(samples, range(len(samples)))
            assert table.to_pylist() == piece_by_piece(made, samples)


def test_a_template_that_rewrites_history_gives_one_sample_per_answer(chatml):
    chatml.chat_template = REWRITING
    samples = encode(chatml, {"messages": CHAT})
    assert len(samples) == 2
    for (ids, [[start, stop]]), turns in zip(samples, (3, 5), strict=True):
        prompt = encoder(chatml).render(CHAT[: turns - 1], generate=True)
        assert chatml.decode(ids[:start]) == prompt
        answer = CHAT[turns - 1]["content"]
        assert chatml.decode(ids[start:stop]) == f"<think>\n\n</think>\n\n{answer}<|im_end|>"


def test_a_generation_prompt_that_opens_reasoning_is_kept_out_of_the_loss(chatml):
    chatml.chat_template = CHATML.text.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    [(ids, [[start, stop]])] = encode(chatml, {"messages": CHAT[:3]})
    assert chatml.decode(ids[start:stop]) == "It is 5.<|im_end|>"
    assert chatml.decode(ids[:start]).endswith("<|im_start|>assistant\n<think>\n")


def test_an_answer_may_begin_as_the_generation_prompt_goes_on(chatml):
    chatml.chat_template = CHATML.text.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    chat = [*CHAT[:2], {"role": "assistant", "content": "<answer>5</answer>"}]
    assert with_loss(chatml, {"messages": chat}) == ["<answer>5</answer><|im_end|>"]


@pytest.mark.parametrize("today", ["{{ date_string }}", "{{ strftime_now('%d %b %Y') }}"])
def test_a_date_in_the_template_does_not_change_with_the_day(today, demo):
    demo.chat_template = today + LLAMA3.text
    assert "26 Jul 2024" in encoder(demo).render(CHAT)


def test_a_bos_that_the_tokenizer_never_writes_is_not_put_before_plain_text(chatml):
    chatml.bos_token = "<|im_start|>"
    [(ids, _)] = encode(chatml, {"text": "Two plus two."})
    assert chatml.decode(ids) == "Two plus two.<|endoftext|>"


def test_plain_text_stands_between_bos_and_eos_and_all_of_it_carries_loss(demo, chatml):
    [(ids, spans)] = encode(demo, {"text": "Two plus two."})
    assert demo.decode(ids) == "<|begin_of_text|>Two plus two.<|eot_id|>" and spans == [[0, len(ids)]]
    [(ids, spans)] = encode(chatml, {"text": "Two plus two."})
    assert chatml.decode(ids) == "Two plus two.<|endoftext|>" and spans == [[0, len(ids)]]
    [(ids, _)] = encode(demo, {"text": "<|begin_of_text|>Two."})
    assert ids.count(demo.bos_token_id) == 1


@pytest.mark.parametrize(
    ("sample", "status"),
    [
        ({"text": "ok"}, Status.USED),
        ({"text": " \n"}, Status.EMPTY),
        ({"text": None}, Status.BAD),
        ({"text": 5}, Status.BAD),
        ({"text": "bad \ufffd byte"}, Status.BAD),
        ({"text": "lone \ud800 surrogate"}, Status.BAD),
        ({"messages": CHAT}, Status.USED),
        ({"messages": [{"role": "system", "content": ""}, *CHAT[1:]]}, Status.USED),
        ({"messages": []}, Status.EMPTY),
        ({"messages": CHAT[:2]}, Status.WITHOUT_LABEL),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": ""}]}, Status.EMPTY),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": 5}]}, Status.BAD),
        ({"messages": [{"role": None, "content": "a"}]}, Status.BAD),
        ({"messages": "hello"}, Status.BAD),
        ({"messages": ["hello"]}, Status.BAD),
        ({"messages": None}, Status.BAD),
    ],
)
def test_unusable_samples(sample, status):
    assert why_unusable(sample) == status


def test_a_conversation_the_template_refuses_is_a_bad_row(demo):
    demo.chat_template = LLAMA3.text.replace(
        "<|start_header_id|>{{",
        "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|start_header_id|>{{",
    )
    refused = {"messages": [{"role": "tool", "content": "x"}, *CHAT]}
    table = encoder(demo).encode([refused, {"messages": CHAT}], [0, 1])
    assert table["status"].to_pylist() == [Status.BAD, Status.USED]
    assert table["input_ids"][0].as_py() == [] and table["input_ids"].type.value_type == pa.int32()


def test_a_template_that_refuses_the_system_prompt_says_so(demo):
    demo.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"--tokenizer_name .*no system role; try --system_prompt ''"):
        encoder(demo, system="Be brief.")


def test_a_template_that_moves_the_prompt_is_refused(demo):
    demo.chat_template = (
        "{% if add_generation_prompt %}ask: {% else %}told: {% endif %}{{ messages[-1]['content'] }}"
    )
    with pytest.raises(ValueError, match="not written after its own prompt"):
        encoder(demo)


NO_END = "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NO_END += "{% if add_generation_prompt %}### assistant: {% endif %}"


def test_the_end_of_an_answer_is_that_of_the_template(demo, chatml):
    """Qwen's base models end a text with another token than their template ends an answer."""
    name = chatml.convert_ids_to_tokens(turn_end(chatml))
    assert (name, chatml.eos_token) == ("<|im_end|>", "<|endoftext|>")
    assert turn_end(demo) == demo.eos_token_id
    for template in (NO_END, NO_END.replace("{{ m['content'] }}", "").replace("### ", ""), None):
        demo.chat_template = template
        assert turn_end(demo) is None


def test_what_a_template_raises_makes_a_bad_row(demo):
    """Llama's template asks for the length of tool calls where there is such a key."""
    demo.chat_template = "{% for m in messages %}{{ m['calls'] | length if 'calls' in m else '' }}"
    demo.chat_template += "{{ m['content'] }}<|eot_id|>{% endfor %}"
    with_calls = [{**message, "calls": None} for message in CHAT]
    with pytest.raises(TemplateError, match="TypeError: object of type 'NoneType' has no len"):
        encoder(demo).render(with_calls)
    rows = encoder(demo).encode([{"messages": with_calls}], [0])
    assert rows["status"].to_pylist() == [Status.BAD]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_call_of_a_tool_is_learnt_and_the_tools_stand_before_it(chatml):
    chatml.chat_template = WITH_TOOLS
    made = encoder(chatml)
    [[*segments]] = made.segments(CALLING, [{"type": "function", "function": {"name": "weather"}}])
    assert made.writes_tools and '"weather"' in segments[0][0]
    learnt = [text for text, loss in segments if loss]
    call = '{"name": "weather", "arguments": {"place": "Oslo"}}<|im_end|>'
    assert learnt == [call, "It is sunny.<|im_end|>"]
    rows = made.encode([{"messages": CALLING}, {"messages": CALLING[:2]}], [0, 1])
    assert rows["status"].to_pylist() == [Status.USED, Status.USED]
    prompt, answer = made.prompt_and_answer({"messages": CALLING[:2]})
    assert prompt.endswith("assistant\n") and json.loads(answer) == [CALL]


def test_a_template_that_leaves_tool_calls_out_makes_a_bad_row(chatml):
    made = encoder(chatml)
    assert not made.writes_tools
    rows = made.encode([{"messages": CALLING}], [0])
    assert rows["status"].to_pylist() == [Status.BAD]
    assert made.why_bad({"messages": CALLING}).endswith("it leaves the tool calls of an answer out")
    calls = [CALLING[0], CALLING[1] | {"tool_calls": "weather"}]
    assert made.why_bad({"messages": calls}) == "the tool calls of the assistant are no list of calls"


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def with_word_borders(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a word border before a text, as SentencePiece's do."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    words = pre_tokenizers.Metaspace(prepend_scheme="never" if kind == "prepend" else kind)
    made.pre_tokenizer = words
    if kind == "prepend":
        made.normalizer = normalizers.Prepend("\u2581")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=list("\n<>[]/|\u2581")
    )
    made.train_from_iterator(["What is 2 + 3? It is 5. And 3 + 4? user assistant INST"] * 50, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR], ids=["llama2", "zephyr"])
@pytest.mark.parametrize("kind", ["first", "always", "never", "prepend"])
def test_pieces_of_a_conversation_meet_as_they_do_in_one_text(kind, template):
    tokenizer = with_word_borders(kind)
    tokenizer.chat_template = template
    made = encoder(tokenizer)
    whole = tokenizer(made.render(CHAT[1:]), add_special_tokens=False).input_ids
    assert (made.inside is None) == (kind == "never")
    [(ids, _)] = encode(tokenizer, {"messages": CHAT[1:]})
    assert ids == whole


@pytest.mark.parametrize(("family", "same"), [("llama", True), ("qwen3", True), ("qwen2", False)])
def test_an_export_whose_tokenizer_is_read_as_another_is_noticed(family, same, tmp_path):
    """Beside a qwen2 model transformers takes Qwen's own class for any tokenizer."""
    tokenizer = load_tokenizer("demo", family=family)
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    assert reads_back(tmp_path, tokenizer) == same
    (tmp_path / "tokenizer.json").write_text("{")
    assert not reads_back(tmp_path, tokenizer)


def test_a_tokenizers_folder_that_is_not_there_is_told_as_one():
    with pytest.raises(ValueError, match="--tokenizer_name /no/such/folder: there is no such folder; give"):
        load_tokenizer("/no/such/folder", family="llama")


@pytest.mark.parametrize("name", ["no-such-owner/no-such-tokenizer"])
def test_an_unreadable_tokenizer_names_the_flag_and_the_way_out(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=rf"--tokenizer_name {name} .*--model_name.*--tokenizer_name demo"
    ) as info:
        load_tokenizer(name, family="llama")
    assert "\n" not in str(info.value)


def test_the_committed_tokenizer_is_what_its_script_makes(tmp_path):
    from data.train_demo_tokenizer import train

    tokenizer = train()
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER_DIR / name).read_bytes()
    assert len(tokenizer) == 2048
    assert (
        tokenizer.decode(tokenizer("Gr\u00fc\u00dfe, \u4e16\u754c!", add_special_tokens=False)["input_ids"])
        == "Gr\u00fc\u00dfe, \u4e16\u754c!"
    )
