"""Chat templates, prompts identical to inference, and tokens with loss."""

import json
import zlib
from itertools import islice

import numpy as np
import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.data.chat import Encoder, turn_end
from fp8_suite.data.demo import read_demo
from fp8_suite.data.reading.rows import Status, judge
from fp8_suite.data.tokenizer import CHATML, LLAMA3, MISTRAL, load_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
# Like Qwen3's template: only the last answer keeps its reasoning.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_ANSWERS = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}\n{% endfor %}"
NO_END = "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NO_END += "{% if add_generation_prompt %}### assistant: {% endif %}"
GLM4 = (
    "[gMASK]{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
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
# Templates of reasoning models strip the reasoning of finished answers; some open it in the prompt.
STRIPPING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}[/user]"
    "{% elif m.role == 'assistant' %}[answer]{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[answer]OPENED{% endif %}"
)
THOUGHT = "Six sevens are forty-two.\n</think>\n\nThe product is 42."
CALLING_WITH = {**CALLING[1], "content": "I look."}
# Mistral's own template puts the system message into the last turn, if that is a user's.
MOVING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last %}"
    "{% for s in messages if s.role == 'system' %}{{ s.content }} {% endfor %}{% endif %}{{ m.content }}"
    "[/INST]{% elif m.role == 'assistant' %}SPACE{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def encoder(tokenizer, *, chat=True, system=""):
    return Encoder(tokenizer, lambda row: row, chat=chat, system=system)


def encode(tokenizer, sample):
    rows = encoder(tokenizer, chat="messages" in sample).encode([sample], [0]).to_pylist()
    return [(row["input_ids"], np.reshape(row["spans"], (-1, 2)).tolist()) for row in rows]


def with_loss(tokenizer, sample):
    """Return the decoded text of each span."""
    return [tokenizer.decode(ids[a:b]) for ids, spans in encode(tokenizer, sample) for a, b in spans]


def render(tokenizer, messages, **options):
    return encoder(tokenizer).renderer.render(messages, **options)


@pytest.fixture
def demo(tokenizer):
    return tokenizer


def reloaded(tokenizer, folder, family):
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder), family=family)


@pytest.fixture
def chatml(tokenizer, tmp_path):
    """Tokenizer with ChatML markers, without BOS, pad token or template, like Qwen's base models."""
    tokenizer = load_tokenizer("demo", family="llama")
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return reloaded(tokenizer, tmp_path / "chatml", "qwen2")


@pytest.fixture
def mistral(tmp_path):
    """Tokenizer with Mistral's markers and no template, like the base model's."""
    tokenizer = load_tokenizer("demo", family="llama")
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    return reloaded(tokenizer, tmp_path / "mistral", "mistral")


@pytest.mark.parametrize(
    ("name", "template", "text", "answers"),
    [
        ("demo", LLAMA3, LLAMA3_CHAT, ["It is 5.<|eot_id|>", "It is 7.<|eot_id|>"]),
        # There is no loss on the newline after ChatML's end-of-turn token.
        ("chatml", CHATML, CHATML_CHAT, ["It is 5.<|im_end|>", "It is 7.<|im_end|>"]),
        ("mistral", MISTRAL, MISTRAL_CHAT, [" It is 5.<|eot_id|>", " It is 7.<|eot_id|>"]),
    ],
)
def test_family_templates_write_their_text_with_loss_on_answers(name, template, text, answers, request):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.chat_template == template.text and tokenizer.pad_token is not None
    made = encoder(tokenizer)
    assert made.renderer.render(CHAT) == text
    assert text.startswith(made.renderer.render(CHAT[:2], generate=True) + answers[0])
    [(ids, _)] = encode(tokenizer, {"messages": CHAT})
    assert tokenizer.decode(ids) == text
    assert with_loss(tokenizer, {"messages": CHAT}) == answers
    # The prompt's tokens are those of inference.
    [(ids, spans)] = encode(tokenizer, {"messages": CHAT[:3]})
    options = {"add_generation_prompt": True, "return_dict": False, "tokenize": True}
    at_inference = tokenizer.apply_chat_template(CHAT[:2], **options)
    assert ids[: spans[0][0]] == at_inference
    prompt, answer = made.prompt_and_answer({"messages": CHAT[:3]})
    assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == at_inference
    assert answer == "It is 5."


def test_family_template_needs_its_markers(demo, tmp_path):
    demo.chat_template = None
    for family in ("qwen2", "gpt2"):
        tokenizer = reloaded(demo, tmp_path, family)
        assert tokenizer.chat_template is None
        encoder(tokenizer, chat=False)  # plain text needs no template
        with pytest.raises(UserError, match=r"--tokenizer_name .*no chat template.*--dataset_text_field"):
            encoder(tokenizer)


@pytest.mark.parametrize("template", [LLAMA3.text, CHATML.text], ids=["writes BOS", "leaves BOS"])
def test_exactly_one_bos_in_training_and_at_inference(demo, template, tmp_path):
    assert demo("a")["input_ids"][0] == demo.bos_token_id  # this tokenizer adds BOS
    demo.chat_template = template
    [(ids, _)] = encode(demo, {"messages": CHAT})
    assert ids[0] == demo.bos_token_id and ids.count(demo.bos_token_id) == 1
    loaded = reloaded(demo, tmp_path / "once", "llama")
    bos = "{{ bos_token }}"
    assert loaded.chat_template.removeprefix(bos) == template.removeprefix(bos)
    assert reloaded(loaded, tmp_path / "twice", "llama").chat_template == loaded.chat_template
    assert encode(loaded, {"messages": CHAT}) == encode(demo, {"messages": CHAT})


def piece_by_piece(made, samples):
    """Reference for `Encoder.encode` that calls the tokenizer once per segment."""
    rows = []
    for number, sample in enumerate(samples):
        status = judge(sample)[0]
        for segments in [[]] if status else made.renderer.samples(sample["messages"])[0]:
            ids, spans = [], []
            for text, loss in segments:
                start = len(ids)
                ids += made.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
                spans += [start, len(ids)] if loss else []
            crc = zlib.crc32(np.array(ids, dtype=np.int32).tobytes())
            crc = zlib.crc32(np.array(spans, dtype=np.int32).tobytes(), crc)
            row = {"input_ids": ids, "spans": spans, "row": number, "status": status, "left_out": ""}
            rows.append(row | {"crc": crc, "max_id": max(ids, default=0)})
    return rows


@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_batch_tokenization_matches_per_segment_tokenization(demo, chatml, split_special_tokens):
    problems = [(row["problem"], row["generated_solution"]) for row in islice(read_demo("test"), 20)]
    pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in problems]
    special = "Say <|eot_id|> or <|im_end|>, \u4e16\u754c!  \n\n\tTwo  spaces"
    odd = [{"role": "user", "content": special}, {"role": "assistant", "content": special}]
    samples = [{"messages": messages} for messages in (*pairs, [], odd, CHAT)]
    for tokenizer in (demo, chatml):
        tokenizer.split_special_tokens = split_special_tokens
        for template in (tokenizer.chat_template, REWRITING):
            tokenizer.chat_template = template
            made = encoder(tokenizer)
            # A tokenizer.json may have these settings; calling the tokenizer ignores them.
            tokenizer.backend_tokenizer.enable_truncation(8)
            tokenizer.backend_tokenizer.enable_padding(length=500)
            tokenizer.backend_tokenizer.encode_special_tokens = not split_special_tokens
            assert made.encode(samples, range(len(samples))).to_pylist() == piece_by_piece(made, samples)


def test_template_that_writes_a_token_the_tokenizer_lacks_is_refused(tmp_path):
    load_tokenizer("demo", family="llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=rf"--tokenizer_name {tmp_path}: has no bos_token, which"):
        load_tokenizer(str(tmp_path), family="llama")


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=rf"--tokenizer_name {tmp_path}: has no tokenizer; give a folder or"):
        load_tokenizer(str(tmp_path), family="llama")


@pytest.mark.parametrize("template", [CHATML.text, REWRITING], ids=["chatml", "rewrites history"])
@pytest.mark.parametrize(("turn", "kept"), [(2, 4), (4, 2)], ids=["first", "last"])
def test_answer_of_weight_0_is_prompt(chatml, template, turn, kept):
    chatml.chat_template = template
    chat = [message | {"weight": int(i != turn)} for i, message in enumerate(CHAT)]
    [(ids, [[start, stop]])] = encode(chatml, {"messages": chat})
    made = encoder(chatml)
    assert chatml.decode(ids[:start]) == made.renderer.render(CHAT[:kept], generate=True)
    assert chatml.decode(ids[:stop]) == made.renderer.render(CHAT[: kept + 1]).rstrip()
    assert made.prompt_and_answer({"messages": chat})[1] == CHAT[kept]["content"]


@pytest.mark.parametrize("answer", ["It is 5.", "<answer>5</answer>"])  # the second starts like <think>
def test_reasoning_tag_in_the_generation_prompt_has_no_loss(chatml, answer):
    chatml.chat_template = CHATML.text.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    chat = [*CHAT[:2], {"role": "assistant", "content": answer}]
    [(ids, [[start, stop]])] = encode(chatml, {"messages": chat})
    assert chatml.decode(ids[start:stop]) == f"{answer}<|im_end|>"
    assert chatml.decode(ids[:start]).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("today", ["{{ date_string }}", "{{ strftime_now('%d %b %Y') }}"])
def test_templates_get_a_fixed_date(today, demo):
    demo.chat_template = today + LLAMA3.text
    assert "26 Jul 2024" in render(demo, CHAT)


def test_plain_text_gets_bos_if_the_tokenizer_adds_it_and_eos_with_loss(demo, chatml):
    chatml.bos_token = "<|im_start|>"  # the tokenizer does not add it
    for tokenizer, text in ((demo, "<|begin_of_text|>Two.<|eot_id|>"), (chatml, "Two.<|endoftext|>")):
        [(ids, spans)] = encode(tokenizer, {"text": "Two."})
        assert tokenizer.decode(ids) == text and spans == [[0, len(ids)]]
    assert encode(demo, {"text": "<|begin_of_text|>Two."}) == encode(demo, {"text": "Two."})


def test_refused_conversation_is_a_bad_row_with_the_reason(demo):
    refusal = "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    demo.chat_template = LLAMA3.text.replace("<|start_header_id|>{{", refusal + "<|start_header_id|>{{")
    refused = {"messages": [{"role": "tool", "content": "x"}, *CHAT]}
    made = encoder(demo)
    table = made.encode([refused, {"messages": CHAT}], [0, 1])
    assert table["status"].to_pylist() == [Status.BAD, Status.USED] and table["input_ids"][0].as_py() == []
    assert made.draft(refused).reason == "the chat template refuses it: no tools"
    demo.chat_template = "{% for m in messages %}{{ m['calls'] | length if 'calls' in m else '' }}"
    demo.chat_template += "{{ m['content'] }}<|eot_id|>{% endfor %}"
    crash = {"messages": [{**message, "calls": None} for message in CHAT]}
    assert "TypeError: object of type 'NoneType' has no len" in encoder(demo).draft(crash).reason
    for part in ({"tools": ["search"]}, {"options": "think"}):
        assert encoder(demo).draft({"messages": CHAT} | part).status == Status.BAD


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role; try --system_prompt ''"),
        (WITHOUT_ANSWERS, "writes nothing of"),
    ],
    ids=["raises", "leaves out answers"],
)
def test_unusable_template_is_refused(demo, template, message):
    demo.chat_template = template
    with pytest.raises(UserError, match=f"--tokenizer_name .*{message}"):
        encoder(demo, system="Be brief.")


def test_token_of_the_next_role_ends_answers_with_loss(demo):
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    demo.add_special_tokens({"additional_special_tokens": roles})
    demo.chat_template = GLM4
    made = encoder(demo)
    assert demo.convert_ids_to_tokens(made.turn_end) == "<|user|>"
    chat = [*CHAT[:3], {"role": "tool", "content": "5"}, CHAT[2], *CHAT[3:]]
    [(ids, _)] = encode(demo, {"messages": chat})
    # The last answer ends like one that a user turn follows.
    assert ids == demo(made.renderer.render(chat) + "<|user|>", add_special_tokens=False).input_ids
    five, seven = "\nIt is 5.", "\nIt is 7."
    assert with_loss(demo, {"messages": chat}) == [f"{five}<|tool|>", f"{five}<|user|>", f"{seven}<|user|>"]


def test_roles_that_the_template_names_are_accepted(demo):
    chat = {"messages": [CHAT[1], {"role": "critic", "content": "Hm."}, CHAT[2]]}
    status, reason, *_ = encoder(demo).draft(chat)
    assert status == Status.BAD and reason.startswith("unknown role 'critic'; known are system, ")
    demo.chat_template = "{% set known = ['critic'] %}" + demo.chat_template
    assert encoder(demo).draft(chat).status == Status.USED


def test_turn_end_is_the_end_of_turn_token(demo, chatml):
    name = chatml.convert_ids_to_tokens(turn_end(chatml))
    assert (name, chatml.eos_token) == ("<|im_end|>", "<|endoftext|>")  # as in Qwen's base models
    assert turn_end(demo) == demo.eos_token_id
    for template in (NO_END, NO_END.replace("{{ m['content'] }}", "").replace("### ", ""), None):
        demo.chat_template = template
        assert turn_end(demo) is None


def test_tool_call_has_loss_and_tools_are_in_the_prompt(chatml):
    chatml.chat_template = WITH_TOOLS
    made = encoder(chatml)
    [segments], _ = made.renderer.samples(CALLING, [{"type": "function", "function": {"name": "weather"}}])
    assert made.renders_tools and '"weather"' in segments[0][0]
    call = '{"name": "weather", "arguments": {"place": "Oslo"}}<|im_end|>'
    assert [text for text, loss in segments if loss] == [call, "It is sunny.<|im_end|>"]
    prompt, answer = made.prompt_and_answer({"messages": CALLING[:2]})
    assert prompt.endswith("assistant\n") and json.loads(answer) == [CALL]


@pytest.mark.parametrize("opened", ["<think>{{ '\\n' }}", "<think>", ""])
@pytest.mark.parametrize("written", ["<think>\n", "<think>", ""])
def test_stripped_reasoning_is_trained_on(demo, opened, written):
    demo.chat_template = STRIPPING.replace("OPENED", opened)
    question = {"role": "user", "content": "6 times 7?"}
    chat = [question, {"role": "assistant", "content": written + THOUGHT}] * 2
    samples, left_out = encoder(demo).renderer.samples(chat)
    assert not left_out and len(samples) == 2  # the second prompt lacks the first reasoning
    for sample, turns in zip(samples, (1, 3), strict=True):
        (prompt, _), (answer, _), _ = sample
        assert prompt == render(demo, chat[:turns], generate=True)
        assert answer.endswith(f"{THOUGHT}<|eot_id|>") and (prompt + answer).count("<think>") <= 1


@pytest.mark.parametrize(
    ("answer", "left_out"),
    [
        (CALLING_WITH, ["tool_calls"]),
        ({"role": "assistant", "content": "Yes.", "reasoning_content": "Because."}, ["reasoning_content"]),
        ({"role": "assistant", "content": "Yes.", "reasoning_content": "", "tool_calls": []}, []),
        (CALLING_WITH | {"weight": 0}, []),
    ],
)
def test_parts_that_the_template_leaves_out_are_named(chatml, answer, left_out):
    chat = {"messages": [CHAT[1], answer, *CHAT[1:3]]}
    assert encoder(chatml).draft(chat)[::3] == (Status.USED, left_out)


def test_content_and_single_calls_that_the_template_leaves_out_are_named(chatml):
    calls = "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function'] | tojson }}{% else %}"
    renamed = CHATML.text.replace("message", "m").replace("ms", "messages")
    chatml.chat_template = renamed.replace("{{ m['content'] }}", calls + "{{ m['content'] }}{% endif %}")
    search = {"type": "function", "function": {"name": "search"}}
    made = encoder(chatml)
    for answer, left_out in ((CALLING[1], []), (CALLING_WITH, ["content"])):
        assert made.draft({"messages": [CHAT[1], answer]}).left_out == left_out
    several = CALLING[1] | {"tool_calls": [CALL, search]}
    assert made.draft({"messages": [CHAT[1], several]}).left_out == ["tool_calls"]


@pytest.mark.parametrize("content", ["", "<think>\nI search.\n</think>\n\n"])
def test_answer_of_which_nothing_is_written_makes_a_bad_row(chatml, content):
    """The template writes no calls, and strips the reasoning: white space is left."""
    chatml.chat_template = CHATML.text.replace("['content']", "['content'].split('</think>')[-1]")
    answer = CALLING[1] | {"content": content}
    status, reason, *_ = encoder(chatml).draft({"messages": [CALLING[0], answer]})
    assert status == Status.BAD and reason.endswith("it writes nothing of an answer")


@pytest.mark.parametrize("space", ["", " "])
def test_prompts_are_those_of_inference_where_later_turns_change_them(demo, space):
    demo.chat_template = MOVING.replace("SPACE", space)
    bos, first, second = "<|begin_of_text|>", "It is 5.<|eot_id|>", "It is 7.<|eot_id|>"
    prompts = [f"{bos}[INST]Be brief. {CHAT[1]['content']}[/INST]"]
    prompts += [f"{bos}[INST]{CHAT[1]['content']}[/INST]{space}{first}[INST]Be brief. And 3 + 4?[/INST]"]
    samples, _ = encoder(demo).renderer.samples(CHAT)
    assert samples == [
        [(prompt, False), (space + answer, True), ("", False)]
        for prompt, answer in zip(prompts, (first, second), strict=True)
    ]
    assert [sample[0][0] for sample in samples] == [render(demo, CHAT[:i], generate=True) for i in (2, 4)]


def test_template_options_reach_the_template(demo):
    demo.chat_template = LLAMA3.text + "{% if add_generation_prompt and thinking %}<think>{% endif %}"
    for thinking in (True, False):
        sample = {"messages": CHAT[:3], "options": {"thinking": thinking}}
        [(ids, [[start, _]])] = encode(demo, sample)
        assert demo.decode(ids[:start]).endswith("<think>") == thinking
        assert encoder(demo).prompt_and_answer(sample)[0].endswith("<think>") == thinking


def with_word_borders(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds a word boundary before a text, like SentencePiece."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if kind == "prepend" else kind)
    if kind == "prepend":
        made.normalizer = normalizers.Prepend("\u2581")
    special, alphabet = ["<unk>", "<s>", "</s>"], list("\n<>[]/|\u2581")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["What is 2 + 3? It is 5. And 3 + 4? user assistant INST"] * 50, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR], ids=["llama2", "zephyr"])
@pytest.mark.parametrize("kind", ["first", "always", "never", "prepend"])
def test_segment_tokens_match_tokens_of_the_joined_text(kind, template):
    tokenizer = with_word_borders(kind)
    tokenizer.chat_template = template
    made = encoder(tokenizer)
    joined = tokenizer(made.renderer.render(CHAT[1:]), add_special_tokens=False).input_ids
    assert (made.mid_text is None) == (kind == "never")
    [(ids, _)] = encode(tokenizer, {"messages": CHAT[1:]})
    assert ids == joined
