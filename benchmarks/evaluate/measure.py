"""Measure one model: the loss and the exact match on its data set, and tasks of lm-eval."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fp8_suite.benchmarks.evaluate.answers import expected_answer, final_answer, same_answer
from fp8_suite.benchmarks.evaluate.harness import run_tasks
from fp8_suite.benchmarks.evaluate.targets import Target
from fp8_suite.benchmarks.records.evaluation import Result, smoothed
from fp8_suite.core.errors import UserError, bad_setting, one_line
from fp8_suite.core.readers import read_record
from fp8_suite.data.build import build_layout, evaluated_rows, selected_rows, with_evaluation
from fp8_suite.data.order import BatchShape
from fp8_suite.data.samples import Selection, Split
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.te_models.spec import find_model
from fp8_suite.training.export.generate import end_tokens
from fp8_suite.training.export.loss import load_export, model_loss
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

Answers = list[dict[str, Any]]


def measure(
    target: Target, measures: list[str], tasks: list[str], manager: Any, args: argparse.Namespace
) -> tuple[list[Result], Answers]:
    """Return the results of a model, and its answers. UserError if it or its data cannot be used."""
    cfg, trusts_code = target.cfg, target.cfg.model.trust_remote_code
    spec = find_model(target.path, init="pretrained", use_te=False, trust_remote_code=trusts_code)
    name = cfg.model.tokenizer_name or target.path
    tokenizer = load_tokenizer(name, family=spec.family, trust_remote_code=trusts_code)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = args.batch_size or (128 if device.type == "cuda" else 8)
    if measures:
        cfg.data.check_length(spec.config.get_text_config().max_position_embeddings)
        data = cfg.data, tokenizer, spec.config.get_text_config().vocab_size
        split, selection = evaluated_rows(*data, cfg.optim.seed, of_run=target.held_out)
        shape = BatchShape(batch_size=1, eval_batch_size=min(size, 8))
        rows = with_evaluation(split, selection, build_layout(*data[:2], shape, data[2])).eval
        if rows is None:
            raise bad_setting("the run held out no rows; choose a split", eval_split=cfg.data.eval_split)
    model = load_export(spec.weights, device, trust_remote_code=trusts_code)
    results: list[Result] = []
    answers: Answers = []
    if "exact_match" in measures and (answers := answer(model, split, selection, args.max_new_tokens, size)):
        results.append(exact_match(answers, selection.fingerprint, args.max_new_tokens))
    elif "exact_match" in (args.tasks or ()):
        reason = "its rows have no expected_answer or answer column, no \\boxed{} and no ####"
        raise bad_setting(f"{reason}; drop exact_match from --tasks", dataset_name=cfg.data.dataset_name)
    if tasks:
        options = {name: getattr(args, name) for name in ("num_fewshot", "limit", "apply_chat_template")}
        options["batch_size"] = args.batch_size or ("auto" if device.type == "cuda" else size)
        results += run_tasks(tasks, manager, model, tokenizer, **options)
    if "loss" in measures:  # the last, because it replaces the attention
        loss, samples = model_loss(model, rows, spec, device), len(selection.samples)
        results.insert(0, Result("loss", loss, None, samples, selection.fingerprint, higher_is_better=False))
    quantization = read_record(spec.weights / "config.json").get("quantization_config")
    weights = f"{quantization.get('quant_method')}, dequantized" if quantization else "bf16"
    named = {"model": target.path, "export": target.export, "weights": weights}
    return [replace(result, **named) for result in results], [named | case for case in answers]


def answer(model: Any, split: Split, selection: Selection, max_new_tokens: int, batch_size: int) -> Answers:
    """Return the model's answers to the prompts of all rows that have an expected answer."""
    source, encoder, answers = split.source, split.encoder, []
    for row in selected_rows(split, selection) if source.columns.chat else []:
        prompt, reference = encoder.prompt_and_answer(source.to_sample(row))
        if expected := expected_answer(source.read_row(row), reference):
            answers.append({"prompt": prompt, "expected": expected})
    prompts = [encoding.ids for encoding in encoder.tokenize([case["prompt"] for case in answers])]
    limits = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "turn_end": encoder.turn_end}
    outputs = generate(model, prompts, encoder.tokenizer, **limits)
    for case, output in zip(answers, outputs, strict=True):
        text = encoder.tokenizer.decode(output, skip_special_tokens=True)
        found = final_answer(text)
        right = same_answer(found, case["expected"])
        case |= {"text": text, "found": found, "correct": right, "tokens": len(output)}
    return answers


def exact_match(answers: Answers, data: str, max_new_tokens: int) -> Result:
    """Return the share of right answers."""
    scores, samples = "".join(str(int(case["correct"])) for case in answers), len(answers)
    share = smoothed(scores.count("1"), samples)
    cut = sum(case["tokens"] == max_new_tokens for case in answers)
    note = f"{cut} cut at --max_new_tokens {max_new_tokens}" if cut else None
    error = math.sqrt(share * (1 - share) / samples)
    return Result("exact_match", scores.count("1") / samples, error, samples, data, note=note, scores=scores)


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
