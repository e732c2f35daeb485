"""Convert samples to token ids and loss spans.

Prompt and answer are tokenized separately, so a prompt's tokens are the same as at inference. In chats, loss
is computed on the assistant's answers with their end-of-turn token; in plain text, on every token.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from fp8_suite.core.errors import UserError, bad_setting, first_line
from fp8_suite.data.reading.rows import ROLES, Row, Status, is_answer, judge
from fp8_suite.data.rendering import Renderer, Segment
from fp8_suite.data.tokenizer import adds_bos
from jinja2.exceptions import TemplateError
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
COLUMNS = {  # one entry per sample
    "input_ids": List(Value("int32")),
    "spans": List(Value("int32")),  # tokens with loss: start, stop, start, stop, ...
    "row": Value("int64"),
    "status": Value("int8"),
    "crc": Value("int64"),  # checksum of ids and spans
    "max_id": Value("int32"),  # largest token id
    "left_out": Value("string"),  # parts of the row's answers that the template leaves out, joined by ", "
}


class Draft(NamedTuple):
    """A row before tokenization."""

    status: Status
    reason: str  # why it is BAD
    samples: list[list[Segment]]  # one empty sample if the row is unusable
    left_out: list[str]  # parts of its answers that the chat template leaves out


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the template's end-of-turn token; None without one or without a usable template."""
    try:
        return Encoder(tokenizer, dict, chat=True, system="").turn_end
    except UserError:
        return None


class Encoder:
    """Converter of row batches to token ids and loss spans; picklable, for worker processes.

    Raises UserError for chat data if the tokenizer has no template, or if the template refuses a simple
    conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, to_sample: Callable[[Row], Row], *, chat: bool, system: str
    ):
        self.tokenizer = tokenizer
        self.to_sample = to_sample
        self.adds_bos = adds_bos(tokenizer)
        self.renderer = Renderer(tokenizer, adds_bos=self.adds_bos)
        backend = tokenizer.backend_tokenizer
        self.mid_text = without_leading_space(backend)
        # Special token id -> True if text after it is tokenized as at the start of a document.
        self.special = {
            number: self.mid_text is not None and self._restarts_after(token.content)
            for number, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        # Any word that the template quotes may be a role: templates compare roles with words.
        self.roles = {*ROLES, *re.findall(r"""['"](\w+)['"]""", str(tokenizer.chat_template))}
        self.turn_end: int | None = None  # id of the token that ends an answer
        self.next_turn_token = ""  # its text if it is also the start of the next turn, as <|user|> in GLM-4
        self.renders_tools = False  # True if the template renders tools
        if chat:
            self._probe(system)
        elif tokenizer.eos_token_id is None:
            reason = "has no end-of-text token, which plain text needs"
            raise bad_setting(reason, tokenizer_name=tokenizer.name_or_path)

    def _restarts_after(self, token: str) -> bool:
        joined, alone = (encoding.ids for encoding in self.tokenize([f"{token}b", "b"]))
        return joined[-len(alone) :] == alone

    def _probe(self, system: str) -> None:
        """Set `turn_end` and `renders_tools` from a conversation that every template must accept."""
        name = self.tokenizer.name_or_path
        if self.tokenizer.chat_template is None:
            way_out = "use that of the model's chat version, or train on plain text (--dataset_text_field)"
            raise bad_setting(f"has no chat template, nor is one built in; {way_out}", tokenizer_name=name)
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        chat = [{"role": "system", "content": system}, *chat] if system else chat
        try:
            samples, _ = self.renderer.samples(chat)
        except TemplateError as error:
            way_out = "try --system_prompt ''" if system else "use another tokenizer"
            reason = f"its chat template refuses: {first_line(error).rstrip('.')}; {way_out}"
            raise bad_setting(reason, tokenizer_name=name) from error
        with suppress(TemplateError):
            self.renders_tools = self.renderer.render(chat, [TOOL]) != self.renderer.render(chat)
        (answer, _), (tail, _) = samples[-1][-2:]
        ids = self.tokenize([answer])[0].ids
        self.turn_end = ids[-1] if ids and ids[-1] in self.special else None
        if self.turn_end is None and not tail:
            self._find_next_turn_token(chat)

    def _find_next_turn_token(self, chat: list[Row]) -> None:
        """Set `turn_end` to the special token that starts a user turn, if nothing else ends an answer."""
        with suppress(TemplateError):
            through = self.renderer.render(chat)
            longer = self.renderer.render([*chat, {"role": "user", "content": "c"}])
            ids = self.tokenize([longer[len(through) :]])[0].ids
            if longer.startswith(through) and ids and ids[0] in self.special:
                self.turn_end = ids[0]
                self.next_turn_token = self.tokenizer.backend_tokenizer.id_to_token(ids[0])

    def _move_next_turn_token(self, sample: list[Segment]) -> list[Segment]:
        """Move the special token that follows an answer into the answer; add one to the last answer."""
        moved: list[Segment] = []
        for (text, loss), (after, _) in zip(sample, [*sample[1:], ("", False)], strict=True):
            if loss:
                text += self._leading_special(after) or self.next_turn_token * (not after)
            elif moved:
                text = text[len(self._leading_special(text)) :]
            moved.append((text, loss))
        return moved

    def _leading_special(self, text: str) -> str:
        tokens = map(self.tokenizer.backend_tokenizer.id_to_token, self.special)
        return next((token for token in tokens if text.startswith(token)), "")

    def document(self, text: str) -> list[list[Segment]]:
        """Return plain text as one sample with loss on all of it; add EOS, and BOS if the tokenizer does."""
        bos = self.tokenizer.bos_token if self.adds_bos else ""
        start = "" if text.startswith(bos) else bos
        return [[(start + text + self.tokenizer.eos_token, True)]]

    def prompt_and_answer(self, sample: Row) -> tuple[str, str]:
        """Return (rendered prompt, answer) of a conversation's last answer."""
        messages = sample["messages"]
        last = max(i for i, message in enumerate(messages) if is_answer(message))
        answer = messages[last]["content"] or json.dumps(messages[last].get("tool_calls"))
        tools, options = sample.get("tools"), sample.get("options")
        return self.renderer.render(messages[:last], tools, options, generate=True), answer

    def draft(self, row: Row) -> Draft:
        """Return a row as text segments."""
        sample = self.to_sample(row)
        status, reason = judge(sample, self.roles)
        if status == Status.USED:
            try:
                if "text" in sample:
                    return Draft(status, "", self.document(**sample), [])
                samples, left_out = self.renderer.samples(**sample)
                if self.next_turn_token:
                    samples = [self._move_next_turn_token(segments) for segments in samples]
                return Draft(status, "", samples, left_out)
            except TemplateError as error:
                status, reason = Status.BAD, f"the chat template refuses it: {first_line(error).rstrip('.')}"
        return Draft(status, reason, [[]], [])

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> pa.Table:
        """Encode the columns that `datasets.map` passes."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        return self.encode(rows, numbers)

    def encode(self, rows: Sequence[Row], numbers: Sequence[int]) -> pa.Table:
        """Return a table of COLUMNS with at least one sample per row; unusable rows have no tokens."""
        drafts = [(number, self.draft(row)) for number, row in zip(numbers, rows, strict=True)]
        samples = [(number, draft, segments) for number, draft in drafts for segments in draft.samples]
        texts = [text for _, _, segments in samples for text, _ in segments]
        starting = self.tokenize(texts)
        following = starting if self.mid_text is None else self.tokenize(texts, self.mid_text)
        encodings = zip(starting, following, strict=True)
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        for number, draft, segments in samples:
            ids: list[int] = []
            spans: list[int] = []
            for _, loss in segments:
                start = len(ids)
                first, later = next(encodings)
                ids += (first if not ids or self.special.get(ids[-1]) else later).ids
                spans += [start, len(ids)] if loss else []
            arrays = np.array(ids, dtype=np.int32), np.array(spans, dtype=np.int32)
            crc = zlib.crc32(arrays[1].tobytes(), zlib.crc32(arrays[0].tobytes()))
            left_out = ", ".join(draft.left_out)
            values = (*arrays, number, int(draft.status), crc, int(arrays[0].max(initial=0)), left_out)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return pa.table(columns, schema=Features(COLUMNS).arrow_schema)

    def tokenize(self, texts: list[str], backend: Tokenizer | None = None) -> list[Encoding]:
        """Encode texts as `tokenizer(texts, add_special_tokens=False)` does, or with another `backend`.

        Calls the backend once per batch. Calling the tokenizer is three times slower, because it also
        computes offsets and masks.
        """
        backend = backend or self.tokenizer.backend_tokenizer
        backend.no_truncation()  # tokenizer.json may enable truncation and padding
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend.encode_batch_fast(texts, add_special_tokens=False)


def without_leading_space(backend: Tokenizer) -> Tokenizer | None:
    """Return a copy of the tokenizer without the leading word boundary; None if it adds none.

    SentencePiece tokenizers and a few others add a word boundary before every text. Between the segments of a
    conversation it would be a spurious token.
    """
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    written = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    bare = {name: disable_leading_space(part) for name, part in written.items()}
    if bare == written:
        return None
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | bare))


def disable_leading_space(part: Any) -> Any:
    """Disable leading word boundaries in the JSON of a normalizer or pre-tokenizer."""
    if isinstance(part, list):
        return [kept for item in part if (kept := disable_leading_space(item)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: never.get(key, disable_leading_space(value)) for key, value in part.items()}
