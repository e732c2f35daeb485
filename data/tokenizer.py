"""Load tokenizers, and add a chat template to those without one.

Register templates of further model families in TEMPLATES.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fp8_suite.core.errors import bad_setting, one_line
from fp8_suite.core.files import require_folder
from fp8_suite.data.demo import TOKENIZER_DIR
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto.tokenization_auto import get_tokenizer_config


class Template(NamedTuple):
    text: str  # Jinja
    markers: tuple[str, ...]  # special tokens that the vocabulary must contain
    pad: str  # padding token if the tokenizer has none


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
# Version 3 of Mistral's format, the first with special tokens as markers. It has no system role. Mistral puts
# the system text into the last user turn, where it would move with every turn; here it is in the first.
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
# Hugging Face `model_type` -> template for tokenizers without one, such as those of base models.
TEMPLATES: dict[str, Template] = {
    "llama": LLAMA3,
    "qwen2": CHATML,
    "qwen2_moe": CHATML,
    "qwen3": CHATML,
    "qwen3_moe": CHATML,
    "mistral": MISTRAL,
}


def load_tokenizer(name: str, *, family: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, a local folder or `demo`, and set chat template and padding token.

    `family` is the model's `model_type`. A tokenizer without a template gets the family's if its vocabulary
    contains the markers. Otherwise it has none, and chat data is refused. UserError if loading fails.
    """
    path = str(TOKENIZER_DIR) if name == "demo" else name
    require_folder("tokenizer_name", name)
    try:
        tokenizer = _load_as_saved(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a hub client, a parser or remote code may raise anything
        is_without = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
        reason = "has no tokenizer" if is_without else one_line(error)
        way_out = "give a folder or hub id with a tokenizer, or demo (default: that of --model_name)"
        raise bad_setting(f"{reason}; {way_out}", tokenizer_name=name) from error
    if not tokenizer.is_fast:
        reason = "has no fast version (tokenizer.json); convert it and use the converted folder"
        raise bad_setting(reason, tokenizer_name=name)
    template, token_to_id = TEMPLATES.get(family), tokenizer.backend_tokenizer.token_to_id
    if template and tokenizer.chat_template is None and None not in map(token_to_id, template.markers):
        tokenizer.chat_template = template.text
    written = tokenizer.chat_template
    for token in ("bos_token", "eos_token"):
        if isinstance(written, str) and token in written and getattr(tokenizer, token) is None:
            reason = f"has no {token}, which its chat template writes; is its tokenizer_config.json missing?"
            raise bad_setting(reason, tokenizer_name=name)
    if isinstance(written, str) and adds_bos(tokenizer):  # at inference only the template adds BOS
        writes_bos = "bos_token" in written or tokenizer.bos_token in written
        tokenizer.chat_template = written if writes_bos else "{{ bos_token }}" + written
    if tokenizer.pad_token is None:
        has_pad = template is not None and token_to_id(template.pad) is not None
        tokenizer.pad_token = template.pad if has_pad else tokenizer.eos_token
    return tokenizer


def _load_as_saved(path: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer, with the general class if it was saved with that one.

    For some model types, such as qwen2, AutoTokenizer prefers the type's own class, whose pre-tokenization
    replaces that of tokenizer.json: a model exported with another tokenizer would read other tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    saved = get_tokenizer_config(path, **options).get("tokenizer_class")
    if saved == TokenizersBackend.__name__ != type(tokenizer).__name__:
        return TokenizersBackend.from_pretrained(path, **options)
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokenizer adds BOS to every text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
