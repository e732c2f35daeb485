"""Render conversations with the chat template, and find the answers in the text.

An answer's prompt is what inference renders for the turns before it. Its own text is what the template writes
for it, or would have to write for the whole of it: templates of reasoning models strip the reasoning from a
finished answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

from fp8_suite.core.errors import first_line
from fp8_suite.data.reading.rows import WEIGHT, Row, is_answer
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

Segment = tuple[str, bool]  # (text, True if loss is computed on its tokens)
Render = Callable[..., str]  # `Renderer.render` of one conversation's tools and template options

MARK = "\ufdd0"  # takes the place of an answer's content; it is no character, so no text contains it
NO_PARTS = ("role", "content", WEIGHT, "name", "id", "tool_call_id")  # keys that are no text of an answer
MAX_LEAD = 200  # characters that a template may write between a turn and the content of its answer
# Some templates write today's date into the prompt. A fixed date keeps the text the same after a resume.
TEMPLATE_DATE = date(2024, 7, 26)


class Renderer:
    """Chat template of a tokenizer; `adds_bos` if the tokenizer adds BOS to every text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, adds_bos: bool):
        self.tokenizer, self.adds_bos = tokenizer, adds_bos

    def render(
        self,
        messages: list[Row],
        tools: list[Row] | None = None,
        options: Row | None = None,
        *,
        generate: bool = False,
    ) -> str:
        """Render a conversation including special tokens; tokenize the text with add_special_tokens=False.

        `options` are variables of the template. `generate` adds the generation prompt. Every error of a
        template is raised as TemplateError.
        """
        dates = {"date_string": TEMPLATE_DATE.strftime("%d %b %Y"), "strftime_now": TEMPLATE_DATE.strftime}
        template = partial(self.tokenizer.apply_chat_template, messages, tools=tools, tokenize=False)
        try:
            text = template(add_generation_prompt=generate, **dates | (options or {}))
        except TemplateError:
            raise
        except Exception as error:  # templates are programs and raise any error on unexpected keys
            raise TemplateError(f"{type(error).__name__}: {first_line(error)}") from error
        bos = self.tokenizer.bos_token
        return bos + text if self.adds_bos and not text.startswith(bos) else text

    def samples(
        self, messages: list[Row], tools: list[Row] | None = None, options: Row | None = None
    ) -> tuple[list[list[Segment]], list[str]]:
        """Return the samples of a conversation as text segments, and the message parts left out of answers.

        TemplateError if the template refuses it.

        A conversation is one sample as long as each prompt continues the text before it. Many templates
        render earlier turns differently once a later turn follows: Qwen3 drops their reasoning, Mistral moves
        the system message. The next answer is then a sample of its own. Turns after the last answer are
        dropped.
        """
        render = partial(self.render, tools=tools, options=options)
        samples: list[list[Segment]] = [[]]
        left_out: list[str] = []
        done = tail = ""  # text rendered so far, and text after its last answer
        for i, message in enumerate(messages):
            if not is_answer(message):
                continue
            prompt = render(messages[:i], generate=True)
            text, missing = answer_text(render, messages[:i], message, prompt)
            left_out += missing
            if not prompt.startswith(done):
                samples[-1].append((tail, False))
                samples.append([])
                done = ""
            # ChatML writes a newline after the end-of-turn token. Inference stops before it: no loss on it.
            answer = text.rstrip()
            tail = text[len(answer) :]
            samples[-1] += [(prompt[len(done) :], False), (answer, True)]
            done = prompt + answer
        samples[-1].append((tail, False))
        return samples, list(dict.fromkeys(left_out))


def answer_text(render: Render, before: list[Row], message: Row, prompt: str) -> tuple[str, list[str]]:
    """Return an answer's text after its prompt, and the names of the parts that it lacks.

    TemplateError if the template writes nothing of the answer.
    """

    def finish(answer: Row) -> str:
        return render([*before, answer])

    through, start = finish(message), len(prompt)
    content = _without_opened_tag(prompt, message["content"].strip())
    if not through.startswith(prompt) or not contains(through[start:], content):
        marked = _attempt(finish, {**message, "content": MARK}) or through
        start = answer_start(prompt, through, marked, render(before))
        text = _with_reasoning(through, marked, start, content)
    else:
        text = through[start:]
    parts = {key: value for key, value in message.items() if key not in NO_PARTS and value}
    missing = [name for name, part in parts.items() if _is_left_out(finish, message, name, part, text)]
    if not contains(text, content):
        missing.append("content")
    blank = _attempt(finish, {"role": message["role"], "content": ""}) or ""
    if missing and squeezed(through) == squeezed(blank):
        raise TemplateError("it writes nothing of an answer")
    return text, missing


def answer_start(prompt: str, through: str, marked: str, before: str) -> int:
    """Return where an answer begins in `through`, the chat that it ends.

    `marked` is the same chat with another content, `before` the chat without the answer.
    """
    if through.startswith(prompt):
        return len(prompt)
    content = len(common_start(through, marked))
    # The generation prompt may contain text that a finished answer lacks, such as an opening <think>.
    shared = len(common_start(prompt, through[:content]))
    if shared >= len(before):
        return shared
    # The turns before are rendered differently, but end like the prompt: find the longest common ending.
    ending = prompt[: -MAX_LEAD - 1 : -1]
    ends = range(content, max(0, content - MAX_LEAD) - 1, -1)
    return max(ends, key=lambda end: len(common_start(ending, through[max(0, end - MAX_LEAD) : end][::-1])))


def _with_reasoning(through: str, marked: str, start: int, content: str) -> str:
    """Return the answer that starts at `start`, with all of its content if only the end of it was written.

    Templates strip the reasoning from finished answers, but inference generates it.
    """
    lead, _, end = marked.partition(MARK)
    written = through.removeprefix(lead).removesuffix(end)
    is_only_end = squeezed(written) and squeezed(content).endswith(squeezed(written))
    if through == lead + written + end != marked and is_only_end and not lead[start:].strip():
        return lead[start:] + content + end
    return through[start:]


def _without_opened_tag(prompt: str, content: str) -> str:
    """Return the content without a tag at its start, such as <think>, that ends the prompt."""
    tag = re.match(r"<\w+>|\[\w+\]", content)
    if tag is None or not prompt.rstrip().endswith(tag[0]):
        return content
    return content[tag.end() :].removeprefix(prompt[len(prompt.rstrip()) :])


def _is_left_out(finish: Callable[[Row], str], message: Row, name: str, part: Any, text: str) -> bool:
    """True if the answer's text lacks a part of its message, or an item of it."""
    if isinstance(part, str):
        return not contains(text, part)
    if not isinstance(part, list | dict):
        return False
    without = [{key: value for key, value in message.items() if key != name}]
    if isinstance(part, list) and len(part) > 1:
        without += [message | {name: part[:i] + part[i + 1 :]} for i in range(len(part))]
    return finish(message) in [_attempt(finish, shorter) for shorter in without]


def _attempt(finish: Callable[[Row], str], message: Row) -> str | None:
    """Render a changed answer; None if the template refuses it."""
    try:
        return finish(message)
    except TemplateError:
        return None


def common_start(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 - characters are meant


def contains(text: str, part: str) -> bool:
    """True if the text contains the part, apart from white space."""
    return part in text or squeezed(part) in squeezed(text)


def squeezed(text: str) -> str:
    return "".join(text.split())
