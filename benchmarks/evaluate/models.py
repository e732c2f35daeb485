"""Load a model in transformers; compute its loss and its greedy answers in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fp8_suite.benchmarks.records.runs import bad_input
from fp8_suite.core.errors import UserError, one_line
from fp8_suite.core.hub import require_reachable_hub
from fp8_suite.data.collate import build_batch
from fp8_suite.data.samples import Samples
from fp8_suite.te_models.hugging_face import HFCausalLM
from fp8_suite.te_models.presets import require_model
from fp8_suite.te_models.spec import ModelSpec, auto_class, inference_dtype
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig

AUTO_BATCH = {"cuda": 128, "cpu": 8}  # halved when the GPU is out of memory


def read_spec(name: str, *, trust_remote_code: bool) -> ModelSpec:
    """Read a model's configuration. UserError if there is no such model."""
    try:
        require_model(name, "pretrained")
        require_reachable_hub(name, ("config.json",))
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files and remote code raise any error
        raise bad_input(
            f"{name}: no model: {one_line(error).partition(f'{name}: ')[2] or one_line(error)}"
        ) from error
    return ModelSpec(name, config, None, trust_remote_code)


def load(spec: ModelSpec) -> tuple[Any, str]:
    """Load a model in the dtype for inference; return it and the form of its weights.

    Quantized weights are read by transformers' quantizer. UserError if weights are missing or damaged.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": inference_dtype(device), "output_loading_info": True}
    options |= {"config": spec.config, "trust_remote_code": spec.trust_remote_code}
    weights = choose_kernels(getattr(spec.config, "quantization_config", None))
    try:
        kind = auto_class(spec.config, trust_remote_code=spec.trust_remote_code)
        model, problems = kind.from_pretrained(spec.name, **options)
    except Exception as error:  # damaged files and quantizers raise any error
        raise bad_input(f"{spec.name}: cannot be loaded: {one_line(error)}") from error
    if missing := sorted(problems["missing_keys"]):
        raise bad_input(f"{spec.name}: its files lack {len(missing)} weights, {missing[0]} first")
    return model.to(device).eval(), weights


def choose_kernels(quantization: dict[str, Any] | None) -> str:
    """Set whether FP8 weights are multiplied in FP8 or dequantized; return the form of the weights."""
    method = (quantization or {}).get("quant_method", "bf16")
    if method not in ("fp8", "compressed-tensors"):
        return method
    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if method == "compressed-tensors":
        quantization["use_optimized_inference"] = has_fp8
    elif has_fp8:
        from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

        try:
            load_finegrained_fp8_kernel()
        except Exception:  # no package `kernels`, no network, or no build for this torch
            has_fp8 = False
    quantization["dequantize"] = not has_fp8
    return "fp8" if has_fp8 else "fp8, dequantized"


def in_batches(lengths: list[int], size: int, work: Callable[[list[int]], list[Any]]) -> list[Any]:
    """Return the results of `work` on batches of indices, the longest first; halve them if memory is full."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    results: dict[int, Any] = {}
    progress = tqdm(total=len(order), disable=None, leave=False)
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
    progress.close()
    return [results[i] for i in range(len(lengths))]


@torch.no_grad()
def evaluation_loss(spec: ModelSpec, model: Any, samples: Samples, *, pad: int, size: int) -> float:
    """Return the mean loss over all label tokens."""
    wrapped = HFCausalLM(model, known_family=spec.is_known_family)

    def losses(indices: list[int]) -> list[tuple[Tensor | float, int]]:
        rows = samples.fetch(indices)
        batch = build_batch([[row] for row in rows], max(len(row.ids) for row in rows), pad).to(model.device)
        total = wrapped(**batch.inputs).loss.double()
        return [(total, batch.label_tokens), *[(0.0, 0)] * (len(rows) - 1)]

    totals, tokens = zip(*in_batches(samples.length.tolist(), size, losses), strict=True)
    return float(sum(totals)) / sum(tokens)


@torch.inference_mode()
def generate(
    model: Any, prompts: list[list[int]], *, ends: list[int], pad: int, max_new_tokens: int, size: int
) -> list[list[int]]:
    """Return the tokens after each prompt, greedily, up to one of `ends`, which is left out."""

    def continue_prompts(indices: list[int]) -> list[list[int]]:
        width = max(len(prompts[i]) for i in indices)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in indices])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in indices])
        output = model.generate(ids.to(model.device), attention_mask=mask.to(model.device))
        return [until(tokens, ends) for tokens in output[:, width:].tolist()]

    exported, model.generation_config = (
        model.generation_config,
        GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=pad
        ),
    )  # without the export's penalties
    try:
        return in_batches([len(prompt) for prompt in prompts], size, continue_prompts)
    finally:
        model.generation_config = exported


def until(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
