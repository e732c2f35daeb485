"""Generation settings of an exported model, and its answers to prompts after training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import first_line
from fp8_suite.training.export.loss import load_export
from transformers import AutoTokenizer, GenerationConfig


def generation_config(plan: Any, tokenizer: Any, *, turn_end: int | None, own_tokenizer: bool) -> Any:
    """Return the source model's generation settings, or defaults if transformers rejects them.

    Generation ends at the tokenizer's EOS and at `turn_end`, the chat template's end-of-turn token. It also
    ends at the source's EOS tokens if the model has its `own_tokenizer`: in another one these ids differ.
    """
    generation = GenerationConfig.from_model_config(plan.config)
    path = plan.weights / "generation_config.json" if plan.weights else None
    if path and path.exists():
        try:
            generation = GenerationConfig.from_pretrained(plan.weights)
            generation.validate(strict=True)
        except (ValueError, OSError) as error:
            generation = GenerationConfig.from_model_config(plan.config)
            reason = first_line(error)
            print(f"WARNING: {path} is not exported: transformers rejects it ({reason})", flush=True)
    ends = end_tokens(generation, tokenizer, turn_end, own_tokenizer=own_tokenizer)
    generation.eos_token_id = ends or None
    generation.pad_token_id = tokenizer.pad_token_id
    return generation


def end_tokens(
    generation: Any, tokenizer: Any, turn_end: int | None, *, own_tokenizer: bool = True
) -> list[int]:
    """Return the tokens that end a generated text; see `generation_config`."""
    source = generation.eos_token_id if own_tokenizer else None
    ends = {*(source if isinstance(source, list) else [source]), tokenizer.eos_token_id, turn_end}
    return sorted(ends - {None})


# Text that exposes tokenizer differences: contractions, digits, runs of spaces, scripts, code.
TOKENIZER_SAMPLE = "It's 3.14 x 1000 = 3140?\n\n   Gr\u00fc\u00dfe, \u4e16\u754c! def f(a_b):\treturn a_b\n"


def tokenizer_round_trips(export: Path, tokenizer: Any, *, trust_remote_code: bool = False) -> bool:
    """True if AutoTokenizer loads a tokenizer equal to the one used in training.

    For some model types AutoTokenizer picks another class.
    """
    try:
        loaded = AutoTokenizer.from_pretrained(export, trust_remote_code=trust_remote_code)
    except Exception:  # remote code may raise anything; a finished run must not fail here
        return False
    return loaded(TOKENIZER_SAMPLE)["input_ids"] == tokenizer(TOKENIZER_SAMPLE)["input_ids"]


def generate_answers(
    export: Path,
    prompts: list[tuple[str, str]],
    tokenizer: Any,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> str:
    """Answer prompts greedily with the exported model. Return a text with the reference answers."""
    model = load_export(export, device, trust_remote_code=trust_remote_code)
    texts = []
    for prompt, reference in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
        output = model.generate(**inputs, max_new_tokens=200, do_sample=False)
        reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        texts.append(f"PROMPT\n{prompt}\nANSWER\n{reply}\nREFERENCE\n{reference}\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(texts))
