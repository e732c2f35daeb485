"""Measure one model: the loss and the exact match on its data set, and tasks of lm-eval."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from fp8_suite.benchmarks.evaluate.answers import expected_answer, final_answer, same_answer
from fp8_suite.benchmarks.evaluate.harness import run_tasks
from fp8_suite.benchmarks.evaluate.models import AUTO_BATCH, evaluation_loss, generate, load, read_spec
from fp8_suite.benchmarks.evaluate.targets import Target
from fp8_suite.benchmarks.records.evaluation import Result, smoothed
from fp8_suite.core.errors import bad_setting
from fp8_suite.data.build import evaluated_rows, selected_rows
from fp8_suite.data.samples import Selection, Split
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.training.precision.torchao_fp8 import silence_import

Answers = list[dict[str, Any]]


def measure(
    target: Target, measures: list[str], tasks: list[str], manager: Any, args: argparse.Namespace
) -> tuple[list[Result], Answers]:
    """Return the results of a model, and its answers. UserError if it or its data cannot be used."""
    silence_import()
    cfg, trusts_code = target.cfg, target.cfg.model.trust_remote_code
    spec = read_spec(target.path, trust_remote_code=trusts_code)
    name = cfg.model.tokenizer_name or target.path
    tokenizer = load_tokenizer(name, family=spec.family, trust_remote_code=trusts_code)
    sizes = spec.config.get_text_config()
    if measures:
        cfg.data.check_length(getattr(sizes, "max_position_embeddings", None))
        seed, of_run = cfg.optim.seed, target.held_out
        split, selection = evaluated_rows(cfg.data, tokenizer, sizes.vocab_size, seed, of_run=of_run)
        if selection is None or not len(selection.samples):
            raise bad_setting("the run held out no rows; choose a split", eval_split=cfg.data.eval_split)
    model, weights = load(spec)
    size = args.batch_size or AUTO_BATCH[model.device.type]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id < sizes.vocab_size else 0
    results: list[Result] = []
    answers: Answers = []
    if "loss" in measures:
        loss = evaluation_loss(spec, model, selection.samples, pad=pad, size=size)
        results.append(Result("loss", loss, None, len(selection.samples), selection.fingerprint, False))
    if "exact_match" in measures and (cases := cases_of(split, selection)):
        options = {"pad": pad, "size": size, "max_new_tokens": args.max_new_tokens}
        answers = answer(model, split, cases, **options)
        scores = "".join(str(int(case["correct"])) for case in answers)
        samples, right = len(scores), scores.count("1")
        share, cut = smoothed(right, samples), sum(case["tokens"] == args.max_new_tokens for case in answers)
        note = f"{cut} cut at --max_new_tokens {args.max_new_tokens}" if cut else None
        stderr = math.sqrt(share * (1 - share) / samples)
        matched = Result("exact_match", right / samples, stderr, samples, selection.fingerprint)
        results.append(replace(matched, note=note, scores=scores))
    elif "exact_match" in args.tasks:
        reason = "its rows have no expected_answer or answer column, no \\boxed{} and no ####"
        raise bad_setting(f"{reason}; drop exact_match from --tasks", dataset_name=cfg.data.dataset_name)
    if tasks:
        options = {name: getattr(args, name) for name in ("num_fewshot", "limit", "apply_chat_template")}
        options["batch_size"] = args.batch_size or ("auto" if model.device.type == "cuda" else size)
        results += run_tasks(tasks, manager, model, tokenizer, **options)
    named = {"model": target.path, "export": target.export, "weights": weights}
    return [replace(result, **named) for result in results], [named | case for case in answers]


def cases_of(split: Split, selection: Selection) -> list[tuple[str, str]]:
    """Return the (rendered prompt, expected answer) of each row that has one."""
    source, cases = split.source, []
    for row in selected_rows(split, selection) if source.columns.chat else []:
        prompt, reference = split.encoder.prompt_and_answer(source.to_sample(row))
        cases.append((prompt, expected_answer(source.read_row(row), reference)))
    return [(prompt, expected) for prompt, expected in cases if expected]


def answer(model: Any, split: Split, cases: list[tuple[str, str]], **options: Any) -> Answers:
    """Return the model's answer to each prompt, and whether it is the expected one."""
    encoder, tokenizer = split.encoder, split.encoder.tokenizer
    prompts = [encoding.ids for encoding in encoder.tokenize([prompt for prompt, _ in cases])]
    exported = model.generation_config.eos_token_id
    ends = {
        *(exported if isinstance(exported, list) else [exported]),
        tokenizer.eos_token_id,
        encoder.turn_end,
    }
    outputs = generate(model, prompts, ends=sorted(ends - {None}), **options)
    answers: Answers = []
    for (prompt, expected), output in zip(cases, outputs, strict=True):
        text = tokenizer.decode(output, skip_special_tokens=True)
        found = final_answer(text)
        case = {"expected": expected, "found": found, "correct": same_answer(found, expected)}
        answers.append(case | {"tokens": len(output), "prompt": prompt, "text": text})
    return answers
