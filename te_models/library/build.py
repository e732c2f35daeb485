"""TE models for loops other than the suite's: `from_pretrained` and `convert`."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.core.settings import nearest
from fp8_suite.te_models.build import build_te
from fp8_suite.te_models.families import head_dim
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.te_models.library.modeling import SCALING_FILE, TEForCausalLM
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.precision.recipes import check_gemm_sizes, make_recipe, why_not
from fp8_suite.te_models.precision.te_runtime import why_not_te
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import ModelSpec, find_model, on_meta, parameter_shapes, refuse_te, tied_names
from fp8_suite.te_models.weights import TensorSource, load_te
from fp8_suite.training.precision.settings import RECIPE_SETTINGS, PrecisionConfig, unread_settings
from safetensors.torch import load_file
from torch import nn

ATTENTION = ExitStack()  # TE's choice of attention, until the next model is built
MAX_POSITIONS = 2048  # length of the first RoPE tables, which grow with the longest row


def from_pretrained(
    name: str,
    recipe: str = TE_RECIPES[0],
    *,
    dtype: torch.dtype = torch.float32,
    init: str = "auto",
    seed: int = 0,
    **options: Any,
) -> TEForCausalLM:
    """Return a model of TE layers with the weights of a hub id, folder or preset, as --model_name.

    `recipe` is one of TE's, "bf16" or "fp32". Weights are FP32 masters by default. `options`: see `_build`.
    UserError if the model or the recipe cannot run here.
    """
    spec = find_model(name, init=init, use_te=True, max_seq_length=1)  # rows are checked in forward
    model = _build(spec, recipe, dtype, load_weights=True, seed=seed, **options)
    file = Path(spec.weights or "", SCALING_FILE)
    if not model.model.calibrated and spec.weights and file.exists():
        model.model.saved_scaling = load_file(file, device=str(model.device))
    return model


def convert(hf_model: nn.Module, recipe: str = TE_RECIPES[0], **options: Any) -> TEForCausalLM:
    """Return a model of TE layers with a copy of a transformers model's weights, in their dtype.

    `options`: see `_build`. UserError if TE layers cannot represent the model.
    """
    spec = ModelSpec(type(hf_model).__name__, copy.deepcopy(hf_model.config), None)
    refuse_te(spec.name, spec.config, 1)
    reference = on_meta(spec)
    source = TensorSource(dict(hf_model.named_parameters()))
    source.require(parameter_shapes(reference), optional=tied_names(reference))
    model = _build(spec, recipe, hf_model.dtype, load_weights=False, **options)
    load_te(model.model.decoder, source)
    return model


def _build(
    spec: ModelSpec,
    recipe: str,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    recompute: str = "none",
    load_weights: bool,
    seed: int = 0,
    **settings: Any,
) -> TEForCausalLM:
    """Build the model on this process's GPU, or emulated on the CPU, in evaluation mode.

    `backend` is "auto", "native" or "emulated", `recompute` as --recompute; other settings are those of the
    recipe, such as `fp8_margin`.
    """
    if unknown := settings.keys() - RECIPE_SETTINGS:
        raise TypeError(f"{', '.join(sorted(unknown))}: neither an option nor a setting of a recipe")
    backend = _choose_backend(backend)
    te_recipe = _make_recipe(spec, recipe, backend, PrecisionConfig(**settings))
    if dtype not in (torch.float32, torch.bfloat16):
        raise bad_setting("weights are float32 or bfloat16", dtype=str(dtype).removeprefix("torch."))
    if backend == "native":
        _choose_attention(spec.config)
    gpu = torch.cuda.current_device() if backend == "native" else None
    build_options = BuildOptions(
        te_backend=backend,
        device=torch.device("cpu") if gpu is None else torch.device("cuda", gpu),
        dtype=dtype,
        packed=True,
        max_positions=MAX_POSITIONS,
        seed=seed,
        load_weights=load_weights,
        recompute=recompute,
    )
    return TEForCausalLM(build_te(spec, build_options), recipe, te_recipe).eval()


def _choose_backend(requested: str) -> str:
    if requested == "emulated" or (requested == "auto" and not torch.cuda.is_available()):
        return "emulated"
    if reason := why_not_te():
        raise UserError(f"{reason}; backend='emulated' runs TE's numerics in plain PyTorch, slowly")
    return "native"


def _make_recipe(spec: ModelSpec, name: str, backend: str, settings: PrecisionConfig) -> Any:
    """Return TE's recipe, or None for BF16 and FP32. UserError if it cannot run here."""
    names = (*TE_RECIPES, "bf16", "fp32")
    if name not in names:
        raise bad_setting(f"not one of {', '.join(names)}{nearest(name, names)}", recipe=name)
    for setting, reason in unread_settings(settings, {name}):
        raise bad_setting(reason, **{setting: getattr(settings, setting)})
    if settings.fp8_fast_accumulation and backend == "emulated":
        raise bad_setting("not available with emulated TE layers; drop it", fp8_fast_accumulation=True)
    if name not in TE_RECIPES:
        return None
    if reason := why_not(name, backend):
        able = ", ".join(recipe for recipe in TE_RECIPES if why_not(recipe, backend) is None)
        raise bad_setting(f"cannot run here: {reason}. This machine runs: {able or 'bf16'}", recipe=name)
    sizes = ModelShape.from_hf_config(spec.config).gemm_sizes
    check_gemm_sizes(name, sizes, recipe=name, model_name=spec.name)
    return make_recipe(name, settings, backend)


def _choose_attention(config: Any) -> None:
    """Use FlashAttention 4 in this process if it passes its self-test, and never without, as in a run."""
    ATTENTION.close()
    if flash_attention.set_by_user():
        return
    sizes = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    reason = flash_attention.why_not(sizes[2]) or flash_attention.self_test_te(*sizes, packed=True)
    ATTENTION.enter_context(flash_attention.disabled_in_te() if reason else flash_attention.enabled_in_te())
