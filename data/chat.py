"""Chat templates, and which tokens carry loss.

A sample is either `{"messages": [{"role", "content"}, ...]}`, with `"tools"` where a chat has some (None if
they cannot be read), or `{"text": ...}`, or, of a row that cannot be read, `{"fault": ...}` with what is
wrong. It becomes token ids plus spans `[start, stop)` of the tokens that carry loss: the assistant's answers
with their end-of-turn token, or all of a plain text. A prompt is tokenised by itself, with the generation
prompt at its end, exactly as it will be at inference; the answer follows as a piece of its own.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from jinja2.exceptions import TemplateError
from tokenizers import Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.errors import first_line
from core.hub import refuse_missing_folder, refuse_silent_hub
from data.demo import TOKENIZER_DIR

Row = dict[str, Any]
Segment = tuple[str, bool]  # text, whether its tokens carry loss

# By which a template shows whether it has a place for tools.
A_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# Some templates write today's date into the prompt; a run resumed tomorrow must see the text of today.
TEMPLATE_DATE = date(2024, 7, 26)


class Template(NamedTuple):
    text: str  # Jinja
    markers: tuple[str, ...]  # tokens the vocabulary must hold for it to make sense
    pad: str  # set as padding token where the tokenizer has none


LLAMA3 = Template(
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|finetune_right_pad_id|>",
)
CHATML = Template(
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|endoftext|>",
)
# Version 3 of Mistral's format, the first whose markers are tokens of their own. It has no system role: that
# text opens the first user's turn, for in the last one it would move with every turn.
MISTRAL = Template(
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% set role, text = message['role'], message['content'] | trim %}"
    "{% if role == 'system' %}{% set ns.system = text + '\n\n' if text else '' %}"
    "{% elif role == 'user' %}[INST] {{ ns.system + text }}[/INST]{% set ns.system = '' %}"
    "{% elif role == 'assistant' and not ns.system %} {{ text }}{{ eos_token }}"
    "{% else %}{{ raise_exception('no place for role ' + role + ' here') }}{% endif %}{% endfor %}",
    ("[INST]", "[/INST]"),
    "<pad>",
)
# Used only where the tokenizer brings no template of its own, as base models' tokenizers do.
TEMPLATES: dict[str, Template] = {
    "llama": LLAMA3,
    "qwen2": CHATML,
    "qwen2_moe": CHATML,
    "qwen3": CHATML,
    "qwen3_moe": CHATML,
    "mistral": MISTRAL,
}


def load_tokenizer(
    name: str, *, family: str, trust_remote_code: bool = False, cache_dir: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id, a local folder or `demo`, with the chat template of `family` if it has none.

    `family` is the model's Hugging Face `model_type`. A family that TEMPLATES does not know, or whose markers
    the vocabulary lacks, stays without a template; chat data then raises. A template that leaves BOS to a
    tokenizer which writes one gets it. ValueError if it cannot be read.
    """
    path = str(TOKENIZER_DIR) if name == "demo" else name
    refuse_missing_folder("tokenizer_name", name)
    try:
        refuse_silent_hub(path, ("tokenizer_config.json", "tokenizer.json"), cache_dir)
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, cache_dir=cache_dir
        )
    except Exception as error:  # a hub client, a parser or remote code may raise anything
        raise ValueError(
            f"--tokenizer_name {name} (default: the one of --model_name): {first_line(error).rstrip('.')}; "
            f"give a local folder, or --tokenizer_name demo"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--tokenizer_name {name}: has no fast version (tokenizer.json); convert it and give the folder"
        )
    template, token_to_id = TEMPLATES.get(family), tokenizer.backend_tokenizer.token_to_id
    if template and tokenizer.chat_template is None and None not in map(token_to_id, template.markers):
        tokenizer.chat_template = template.text
    own = tokenizer.chat_template
    leaves_bos = isinstance(own, str) and "bos_token" not in own and (tokenizer.bos_token or "") not in own
    if leaves_bos and adds_bos(tokenizer):
        tokenizer.chat_template = "{{ bos_token }}" + own  # for prompts at inference, which it alone makes
    if tokenizer.pad_token is None:
        known = template is not None and token_to_id(template.pad) is not None
        tokenizer.pad_token = template.pad if known else tokenizer.eos_token
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a BOS before every text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """`Encoder.turn_end` of any tokenizer; None also without a chat template, or with one that refuses."""
    try:
        return Encoder(tokenizer, dict, chat=True, system="").turn_end
    except ValueError:  # data without chats never met it
        return None


class Status(IntEnum):
    """What became of a row, from best to worst; a row of several samples has its worst sample's."""

    USED = 0
    TRUNCATED = 1
    OVERLONG = 2
    WITHOUT_LABEL = 3
    EMPTY = 4
    BAD = 5


class Encoder:
    """Turns batches of rows into token ids and loss spans; goes to worker processes by pickle.

    ValueError if `chat` data meets a tokenizer whose template is missing or refuses a probe conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, to_sample: Callable[[Row], Row], *, chat: bool, system: str
    ):
        self.tokenizer = tokenizer
        self.to_sample = to_sample
        self.adds_bos = adds_bos(tokenizer)
        backend = tokenizer.backend_tokenizer
        self.inside = inside_a_text(backend)
        # Special token -> whether text after it is taken as text by itself, if there is a difference.
        self.special = {
            number: self.inside is not None and self._begins_anew_after(token.content)
            for number, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.turn_end: int | None = None  # the special token that ends an answer in a chat, if one does
        self.writes_tools = False  # whether the template does
        if chat:
            self.turn_end = self._probe(system)
        elif tokenizer.eos_token_id is None:
            raise ValueError(
                f"--tokenizer_name {tokenizer.name_or_path}: has no end-of-text token, which plain text needs"
            )

    def _begins_anew_after(self, token: str) -> bool:
        whole, alone = (encoding.ids for encoding in self.tokenise([f"{token}b", "b"]))
        return whole[-len(alone) :] == alone

    def _probe(self, system: str) -> int | None:
        """`turn_end`, from a conversation that the template must take."""
        name = self.tokenizer.name_or_path
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"--tokenizer_name {name}: has no chat template and none is known that fits it; take the "
                f"tokenizer of the model's chat version, or train on plain text (--dataset_text_field)"
            )
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        probe = [{"role": "system", "content": system}, *probe] if system else probe
        try:
            samples = self.segments(probe)
        except TemplateError as error:
            hint = "; try --system_prompt ''" if system else ""
            raise ValueError(
                f"--tokenizer_name {name}: its chat template refuses: {first_line(error).rstrip('.')}{hint}"
            ) from error
        with suppress(TemplateError):
            self.writes_tools = self.render(probe, [A_TOOL]) != self.render(probe)
        (answer, _), _ = samples[-1][-2:]
        ids = self.tokenise([answer])[0].ids
        return ids[-1] if ids and ids[-1] in self.special else None

    def render(self, messages: list[Row], tools: list[Row] | None = None, *, generate: bool = False) -> str:
        """The conversation as text, special tokens included: tokenise it with add_special_tokens=False.

        jinja2's TemplateError for all that a template may raise.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generate,
                date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
                strftime_now=TEMPLATE_DATE.strftime,
            )
        except TemplateError:
            raise
        except Exception as error:  # as of any program: a template meets keys it does not expect
            raise TemplateError(f"{type(error).__name__}: {first_line(error)}") from error
        bos = self.tokenizer.bos_token
        return bos + text if self.adds_bos and not text.startswith(bos) else text

    def segments(self, messages: list[Row], tools: list[Row] | None = None) -> list[list[Segment]]:
        """Samples of a conversation, as texts with and without loss; jinja2's TemplateError if it is refused.

        It is one sample, unless the template writes earlier turns differently once a later one follows (Qwen3
        drops their reasoning): then each answer is a sample with the prompt it has at inference. What follows
        the last answer is left out.
        """
        samples: list[list[Segment]] = [[]]
        done = tail = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = messages[:i]
            prompt, through = (
                self.render(before, tools, generate=True),
                self.render([*before, message], tools),
            )
            if "tool_calls" in message:
                silent = {key: value for key, value in message.items() if key != "tool_calls"}
                if through == self.render([*before, silent], tools):
                    raise TemplateError("it leaves the tool calls of an answer out")
            if not prompt.startswith(done):
                samples[-1].append((tail, False))
                samples.append([])
                done = ""
            shared = prompt
            if not through.startswith(prompt):
                # A generation prompt may say more than the answer keeps, like an opened <think>.
                # Another answer tells where answers begin: this one may begin as the prompt goes on.
                try:
                    other = self.render([*before, {**message, "content": "\ufdd0"}], tools)
                except TemplateError:  # it takes no answer of this kind
                    other = through
                shared = os.path.commonprefix([prompt, through, other])  # noqa: RUF071 - characters are meant
                if len(shared) < len(self.render(before, tools)):
                    raise TemplateError("an answer is not written after its own prompt")
            # What follows the end-of-turn token (ChatML's newline) is never predicted.
            answer = through[len(shared) :].rstrip()
            tail = through[len(shared) + len(answer) :]
            samples[-1] += [(prompt[len(done) :], False), (answer, True)]
            done = prompt + answer
        samples[-1].append((tail, False))
        return samples

    def prompt_and_answer(self, sample: Row) -> tuple[str, str]:
        """The rendered prompt of a conversation's last answer, and that answer."""
        messages = sample["messages"]
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        answer = messages[last]["content"] or json.dumps(messages[last].get("tool_calls"))
        return self.render(messages[:last], sample.get("tools"), generate=True), answer

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> pa.Table:
        """`encode` for `datasets.map`, which hands over columns."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        return self.encode(rows, numbers)

    def encode(self, rows: Sequence[Row], numbers: Sequence[int]) -> pa.Table:
        """COLUMNS of the rows' samples, at least one per row; an unusable row's sample has no tokens."""
        drafts: list[tuple[int, Status, list[Segment]]] = []
        for number, row in zip(numbers, rows, strict=True):
            sample = self.to_sample(row)
            status, found = why_unusable(sample), [[]]
            if status == Status.USED:
                try:
                    found = self.document(sample["text"]) if "text" in sample else self.segments(**sample)
                except TemplateError:
                    status = Status.BAD
            drafts += [(number, status, segments) for segments in found]
        texts = [text for _, _, segments in drafts for text, _ in segments]
        pieces = self.tokenise(texts)
        inside = pieces if self.inside is None else self.tokenise(texts, self.inside)
        both = zip(pieces, inside, strict=True)
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        for number, status, segments in drafts:
            ids: list[int] = []
            spans: list[int] = []
            for _, loss in segments:
                start = len(ids)
                alone, continued = next(both)
                ids += (alone if not ids or self.special.get(ids[-1]) else continued).ids
                spans += [start, len(ids)] if loss else []
            arrays = np.array(ids, dtype=np.int32), np.array(spans, dtype=np.int32)
            crc = zlib.crc32(arrays[1].tobytes(), zlib.crc32(arrays[0].tobytes()))
            sample = (*arrays, number, int(status), crc, int(arrays[0].max(initial=0)))
            for column, value in zip(columns.values(), sample, strict=True):
                column.append(value)
        lists = {name: list_column(columns[name]) for name in ("input_ids", "spans")}
        return pa.table({**columns, **lists}, schema=Features(COLUMNS).arrow_schema)

    def why_bad(self, row: Row) -> str:
        """What is wrong with a row whose Status is BAD."""
        sample = self.to_sample(row)
        if (wrong := fault(sample)) is not None:
            return wrong
        try:
            self.segments(**sample)
        except TemplateError as error:
            return f"the chat template refuses it: {first_line(error).rstrip('.')}"
        return "the chat template refused it"

    def tokenise(self, texts: list[str], backend: Tokenizer | None = None) -> list[Encoding]:
        """The ids that `tokenizer(texts, add_special_tokens=False)` gives, as `ids` of each encoding.

        `backend` takes the place of the tokenizer's. One call for a whole batch, past the tokenizer's own
        wrapping, which keeps offsets, masks and lists of them that nobody reads: a third of the time.
        """
        backend = backend or self.tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may bring both; lengths are checked later
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend.encode_batch_fast(texts, add_special_tokens=False)

    def document(self, text: str) -> list[list[Segment]]:
        """A plain text between BOS, where the tokenizer writes one, and EOS, all of it with loss."""
        bos = self.tokenizer.bos_token if self.adds_bos else ""
        start = "" if text.startswith(bos) else bos
        return [[(start + text + self.tokenizer.eos_token, True)]]


def inside_a_text(backend: Tokenizer) -> Tokenizer | None:
    """A copy of a tokenizer that takes a text as the middle of a longer one.

    SentencePiece's tokenizers, and a few others, put a word border before every text, which would split each
    conversation where its pieces meet. None for a tokenizer that puts none.
    """
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    own = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    bare = {name: _without_border(part) for name, part in own.items()}
    if bare == own:
        return None
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | bare))


def _without_border(part: Any) -> Any:
    """A normalizer's or pre-tokenizer's JSON without what it puts before a text."""
    if isinstance(part, list):
        return [found for item in part if (found := _without_border(item)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: never.get(key, _without_border(value)) for key, value in part.items()}


# What `Encoder.encode` returns, one entry per sample: token ids; the spans that carry loss, flat (start,
# stop, start, stop, ...); the row's number; its Status; a checksum of ids and spans; the largest id.
COLUMNS = {
    "input_ids": List(Value("int32")),
    "spans": List(Value("int32")),
    "row": Value("int64"),
    "status": Value("int8"),
    "crc": Value("int64"),
    "top": Value("int32"),
}


def list_column(arrays: list[np.ndarray]) -> pa.ListArray:
    """A column that holds one of these int32 arrays per row."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))


def why_unusable(sample: Row) -> Status:
    """USED, or what is wrong with a sample's text before it is tokenised."""
    if fault(sample) is not None:
        return Status.BAD
    if "text" in sample:
        return Status.USED if sample["text"].strip() else Status.EMPTY
    spoken = [m for m in sample["messages"] if m["role"] in ("user", "assistant")]
    if not spoken or not all(m["content"].strip() or m.get("tool_calls") for m in spoken):
        return Status.EMPTY
    answers = any(m["role"] == "assistant" for m in sample["messages"])
    return Status.USED if answers else Status.WITHOUT_LABEL


def is_chat(value: Any) -> bool:
    """Whether a value is a list of objects, as messages, tools and their calls are."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def fault(sample: Row) -> str | None:
    """What in a sample is not the text that it should be; None if nothing is."""
    if "fault" in sample:
        return sample["fault"]
    if "text" in sample:
        return no_text("its text", sample["text"])
    messages = sample["messages"]
    if not isinstance(messages, list):
        return f"its messages are {kind(messages)}, not a list"
    for message in messages:
        if not isinstance(message, dict):
            return f"a message is {kind(message)}, not a role and its content"
        role = message.get("role")
        if not isinstance(role, str):
            return f"the role of a message is {kind(role)}, not text"
        if not is_chat(message.get("tool_calls", [])):
            return f"the tool calls of the {role} are no list of calls"
        if (wrong := no_text(f"what the {role} says", message.get("content"))) is not None:
            return wrong
    return None


def no_text(what: str, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"{what} is {kind(value)}, not text"
    return None if is_utf8(value) else f"{what} is not UTF-8"


def kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def is_utf8(text: str) -> bool:
    """False for lone surrogates, and for U+FFFD, which readers put in place of bytes they cannot decode."""
    if "\ufffd" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
