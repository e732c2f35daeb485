"""FP8 without Transformer Engine: replace linear layers of any causal LM with torchao's Float8Linear.

Recipes, all with dynamic scales (https://github.com/pytorch/ao/tree/main/torchao/float8):

- tensorwise          one scale per tensor; E4M3 forward, E5M2 for gradients. The fastest.
- rowwise             one scale per token and per output channel, powers of two; E4M3 everywhere.
- rowwise_with_gw_hp  as rowwise, but gradients of weights are computed in BF16, and gradients of inputs from
                      a weight with one scale.

Linear layers of the decoder layers are converted; LM head, embeddings and norms are not. A layer that cannot
run in FP8 stays in BF16 and carries the reason, which the coverage table prints.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting, first_line
from fp8_suite.core.recipes import RECIPES
from torch import Tensor, nn

INSTALL = "pip install torchao==0.18.0"
# Class -> layer whose output transformers modifies in place. Autograd forbids that for torchao's layers.
MODIFIED_IN_PLACE = {"Llama4TextMoe": "shared_expert.down_proj"}


@cache
def silence_import() -> None:
    """Filter torchao's import messages about features that training does not use."""
    for name, start in {"torchao": "Failed to load", "torch.utils._pytree": "<enum "}.items():
        logging.getLogger(name).addFilter(lambda record, s=start: not record.getMessage().startswith(s))


def require_torchao() -> None:
    """UserError if torchao is not installed or does not load."""
    try:
        _float8()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"--mixed_precision fp8: without --use_te it needs torchao ({first_line(error)}); install it "
            f"with `{INSTALL}`, or use --mixed_precision bf16",
            flags=("mixed_precision", "use_te"),
        ) from None


def _float8() -> Any:
    silence_import()
    return importlib.import_module("torchao.float8")


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the linear layers in decoder layers, as in the coverage table."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return [name for name, linear in linears if id(linear) in inside]


def convert(
    model: nn.Module,
    recipe_of: Callable[[str], str | None],
    *,
    emulated: bool,
    all_gather: bool = False,
    fp32_scales: bool = False,
) -> None:
    """Convert linear layers of `model.blocks` to FP8; `recipe_of(name)` None or "bf16" keeps a layer.

    Call before sharding; also works on the meta device. Parameters keep names, shapes and dtypes. A
    converted layer gets `fp8_recipe`; a layer that cannot run in its recipe gets `bf16_reason`, the
    reason. `emulated` computes GEMMs of FP8 values in FP32. `all_gather` enables FSDP2's FP8 all-gather if
    the recipe supports it. `fp32_scales` disables rounding of scales to powers of two. UserError if no layer
    can be converted.
    """
    float8, modules = _float8(), dict(model.named_modules())
    names = linear_names(model)
    recipes = {name: recipe for name in names if (recipe := recipe_of(name)) not in (None, "bf16")}
    modified = {f"{name}.{MODIFIED_IN_PLACE.get(type(m).__name__)}" for name, m in modules.items()}
    bf16_reasons = {}
    for name in recipes:
        in_place = "transformers adds to its output in place" if name in modified else None
        if reason := in_place or why_not_fp8(modules[name], RECIPES[recipes[name]].feature_multiple):
            bf16_reasons[name] = modules[name].bf16_reason = reason
    if len(bf16_reasons) == len(recipes) and (recipes or not names):
        reasons = Counter(bf16_reasons.values()) or {"its decoder layers have no nn.Linear": 1}
        text = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
        problem = f"no linear layer of {type(model.model).__name__} can run in FP8 ({text})"
        raise bad_setting(f"{problem}; use bf16, or --use_te if it has this model", mixed_precision="fp8")
    for recipe in dict.fromkeys(recipes.values()):
        chosen = {name for name in recipes if recipes[name] == recipe and name not in bf16_reasons}
        changes = {"round_scales_to_power_of_2": False} if fp32_scales else {}
        config = replace(
            float8.Float8LinearConfig.from_recipe_name(recipe),
            emulate=emulated,
            enable_fsdp_float8_all_gather=all_gather and RECIPES[recipe].fp8_all_gather,
            **changes,
        )
        float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name, chosen=chosen: name in chosen
        )
        for name in chosen:
            linear = model.get_submodule(name)
            linear.fp8_recipe = recipe
            if emulated:
                linear.__class__ = _emulated_linear()


def why_not_fp8(linear: nn.Linear, multiple: int) -> str | None:
    """Return why a linear layer cannot run in FP8, or None."""
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} has its own forward"
    sizes = {"inputs": linear.in_features, "outputs": linear.out_features}
    odd = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % multiple)
    return f"{odd}: not a multiple of {multiple}" if odd else None


@cache
def _emulated_linear() -> type[nn.Module]:
    """Return a subclass of Float8Linear that supports CPU autocast; torchao supports only CUDA's.

    FP32 weights are first rounded to the autocast dtype, to quantize the same values as runs with BF16
    weights. A subclass instead of a patched forward lets compiled layers share one graph.
    """
    library = importlib.import_module("torchao.float8.float8_linear")

    class EmulatedFloat8Linear(library.Float8Linear):
        def forward(self, input: Tensor) -> Tensor:
            device = input.device.type
            if not torch.is_autocast_enabled(device):
                return super().forward(input)
            dtype = torch.get_autocast_dtype(device)
            weight = self.weight.to(dtype).t()
            out = library.matmul_with_hp_or_float8_args.apply(
                input.to(dtype), weight, self.linear_mm_config, self.config
            )
            return out if self.bias is None else out + self.bias.to(out.dtype)

    return EmulatedFloat8Linear


def refresh_scales_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After each optimizer step compute the scales of all FP8-gathered weights in one collective."""
    precompute = _float8().precompute_float8_dynamic_scale_for_fsdp
    optimizer.register_step_post_hook(lambda *_: precompute(model))
