"""TE models for loops other than the suite's: `from_pretrained` and `convert`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from fp8_suite.core.errors import UserError, without_flag
from fp8_suite.core.packages import version
from fp8_suite.core.patches import PEFT_ON_TE
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.te_models.build import build_te
from fp8_suite.te_models.families import head_dim
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import ModelSpec, find_model, refuse_te
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.library.modeling import TEForCausalLM
from fp8_suite.training.precision.checks import check_sizes
from fp8_suite.training.precision.recipes import resolve_precision
from torch import nn

ATTENTION = ExitStack()  # TE's choice of attention, until the next model is built
PEFT = ExitStack()  # peft's choice of adapters, likewise
MAX_POSITIONS = 2048  # length of the first RoPE tables, which grow with the longest row


@without_flag("model_name")
def from_pretrained(
    name: str,
    recipe: str = TE_RECIPES[0],
    *,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    dither_seed: int | None = None,
) -> TEForCausalLM:
    """Return a model of TE layers with the weights of a hub id, folder or preset, as --model_name.

    `recipe` is one of TE's, "bf16" or "fp32". Weights are FP32 masters by default. `backend` is "native",
    "emulated" or "auto": native on a GPU. With a `dither_seed`, weights of an FP8 checkpoint start anywhere
    in their rounding intervals, as in FP8 runs, so that small updates change them. UserError if the model or
    the recipe cannot run here.
    """
    spec = find_model(name, init="auto", use_te=True, max_seq_length=1)  # rows are checked in forward
    spec = replace(spec, dithers=dither_seed is not None)
    return _build(spec, recipe, dtype, backend, load_weights=True, seed=dither_seed or 0)


def convert(hf_model: nn.Module, recipe: str = TE_RECIPES[0], *, backend: str = "auto") -> TEForCausalLM:
    """Return a model of TE layers with a copy of a transformers model's weights, in their dtype.

    `hf_model` may already have TE layers: that changes its recipe. `recipe` and `backend`: see
    `from_pretrained`. UserError if TE layers cannot represent the model.
    """
    spec = ModelSpec(type(hf_model).__name__, copy.deepcopy(hf_model.config), None)
    refuse_te(spec.name, spec.config, 1)
    model = _build(spec, recipe, hf_model.dtype, backend, load_weights=False)
    model.load_state_dict(hf_model.state_dict())
    return model


def _build(
    spec: ModelSpec, recipe: str, dtype: torch.dtype, backend: str, *, load_weights: bool, seed: int = 0
) -> TEForCausalLM:
    """Build the model on this process's GPU, or emulated on the CPU, in evaluation mode."""
    if recipe not in (known := (*TE_RECIPES, "bf16", "fp32")):
        raise UserError(f"recipe {recipe!r}: choose from {', '.join(known)}")
    fp8 = {"mixed_precision": "fp8", "fp8_scenario": recipe, "fp8_fallback": "error"}
    settings = {"use_te": True, "te_backend": backend, **({} if recipe in ("bf16", "fp32") else fp8)}
    precision = resolve_precision(config_from_dict(settings))
    if recipe == "fp32":  # which runs do not have with TE layers
        precision = replace(precision, requested="fp32", effective="fp32")
    check_sizes(precision, spec.name, ModelShape.from_hf_config(spec.config).gemm_sizes)
    dtypes = (torch.float32,) if recipe == "fp32" else (torch.float32, torch.bfloat16)
    if dtype not in dtypes:
        raise UserError(f"{dtype}: weights are {' or '.join(map(str, dtypes))} with recipe {recipe}")
    device = torch.device("cpu")
    if precision.te_backend == "native":
        _choose_attention(spec.config)
        adapt_parameters_by_peft()
        device = torch.device("cuda", torch.cuda.current_device())
    build_options = BuildOptions(
        te_backend=precision.te_backend,
        device=device,
        dtype=dtype,
        packed=True,
        max_positions=MAX_POSITIONS,
        load_weights=load_weights,
        seed=seed,
    )
    return TEForCausalLM(build_te(spec, build_options), precision).eval()


def _choose_attention(config: Any) -> None:
    """Use FlashAttention 4 in this process if it passes its self-test, and never without, as in a run."""
    ATTENTION.close()
    if flash_attention.set_by_user():
        return
    sizes = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    reason = flash_attention.why_not(sizes[2]) or flash_attention.self_test_te(*sizes, packed=True)
    ATTENTION.enter_context(flash_attention.disabled_in_te() if reason else flash_attention.enabled_in_te())


def adapt_parameters_by_peft() -> None:
    """Make peft, if installed, adapt the parameters of native TE modules that `target_parameters` names."""
    PEFT.close()
    if version("peft"):

        def parameters_apart(dispatch: Callable) -> Callable:
            def dispatch_modules(*target: Any, parameter_name: str | None = None, **options: Any) -> Any:
                return None if parameter_name else dispatch(*target, **options)

            return dispatch_modules

        PEFT.enter_context(PEFT_ON_TE.on(parameters_apart))
