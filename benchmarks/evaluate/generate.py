"""Greedy answers to many prompts, in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fp8_suite.core.errors import UserError, one_line
from fp8_suite.training.export.generate import end_tokens
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase


@torch.inference_mode()
def generate(
    model: Any,
    prompts: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    turn_end: int | None,
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Return the tokens after each prompt, without the end token. `turn_end` ends answers to chats."""
    exported = model.generation_config
    ends = end_tokens(exported, tokenizer, turn_end)
    pad = min(tokenizer.pad_token_id, model.get_input_embeddings().num_embeddings - 1)
    limits = {"max_new_tokens": max_new_tokens, "eos_token_id": ends or None, "pad_token_id": pad}

    def answer(indices: list[int]) -> list[list[int]]:
        missing = [max(len(prompts[i]) for i in indices) - len(prompts[i]) for i in indices]
        pairs = list(zip(missing, indices, strict=True))
        ids = torch.tensor([[pad] * left + prompts[i] for left, i in pairs], device=model.device)
        mask = torch.tensor([[0] * left + [1] * len(prompts[i]) for left, i in pairs], device=model.device)
        output = model.generate(ids, attention_mask=mask)[:, ids.shape[1] :].tolist()
        return [tokens[: next((i for i, t in enumerate(tokens) if t in ends), None)] for tokens in output]

    model.generation_config = GenerationConfig(do_sample=False, **limits)  # without the export's penalties
    try:
        return in_batches([len(prompt) for prompt in prompts], batch_size, answer)
    finally:
        model.generation_config = exported


def in_batches(lengths: list[int], size: int, work: Callable[[list[int]], list[Any]]) -> list[Any]:
    """Return the results of `work` on batches of indices, the longest first; halve them if memory is full."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    results: dict[int, Any] = {}
    with tqdm(total=len(order), disable=None, leave=False) as progress:
        while batch := order[len(results) : len(results) + size]:
            try:
                results |= zip(batch, work(batch), strict=True)
                progress.update(len(batch))
                continue
            except torch.OutOfMemoryError as error:
                if size == 1:
                    raise UserError(f"one sample does not fit in GPU memory: {one_line(error)}") from None
            size = -(-size // 2)
            torch.cuda.empty_cache()  # outside of `except`, which keeps the batch's tensors
    return [results[i] for i in range(len(lengths))]
