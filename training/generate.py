"""What an exported model says: its generation settings, and answers to prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch


def generation_config(plan: Any, tokenizer: Any) -> Any:
    """The source model's, or one from its configuration; generation ends at the chat template's turn too."""
    from transformers import GenerationConfig

    if plan.weights and (plan.weights / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(plan.weights)
    else:
        generation = GenerationConfig.from_model_config(plan.config)
    try:
        generation.validate(strict=True)
    except ValueError:  # sampling settings without do_sample, in older folders; they would not be saved
        generation.do_sample = True
    ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get("<|eot_id|>")} - {None}
    generation.eos_token_id = sorted(ends) or None
    generation.pad_token_id = tokenizer.pad_token_id
    return generation


def answer(
    export: Path, prompts: list[tuple[str, str]], device: torch.device, *, trust_remote_code: bool = False
) -> str:
    """Greedy answers of the exported model, loaded as any user would, beside the reference answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trusted = {"trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(export, **trusted)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=dtype, **trusted).to(device).eval()
    texts = []
    for prompt, reference in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
        output = model.generate(**inputs, max_new_tokens=200, do_sample=False)
        reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        texts.append(f"PROMPT\n{prompt}\nANSWER\n{reply}\nREFERENCE\n{reference}\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(texts))
