"""FP8 without Transformer Engine: torchao's Float8Linear in place of the linear layers of any causal LM.

Recipes, each with scales taken from the tensor itself (https://github.com/pytorch/ao/tree/main/torchao/float8):

- tensorwise          one scale a tensor; E4M3 forward, E5M2 for gradients. The fastest.
- rowwise             one scale a token and one an output channel, powers of two; E4M3 everywhere.
- rowwise_with_gw_hp  as rowwise, but gradients of weights are computed in BF16, and gradients of inputs from
                      a weight with one scale.

Linear layers of the decoder layers are converted; LM head, embeddings and norms stay as they are. A layer
that cannot run in FP8 stays in BF16 and carries the reason, which the coverage table prints.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import first_line
from core.recipes import RECIPES, TORCHAO_RECIPES

INSTALL = "pip install torchao==0.18.0"
# torch._scaled_mm takes sizes in 16-byte steps, and an output in them too, so padding could not help.
FEATURE_MULTIPLE = 16
# Class -> its layer whose output transformers changes in place, which autograd forbids of torchao's.
ADDED_TO = {"Llama4TextMoe": "shared_expert.down_proj"}
# What is harmless here but printed when torchao loads: (logger, start of the message).
NOISE = (("torchao", "Failed to load"), ("torch.utils._pytree", "<enum "))


def silence_import() -> None:
    """Keep from the terminal what torchao says while it loads, also when transformers loads it.

    It misses binaries built for other GPUs, Pythons or torch versions, none of which its training uses.
    """
    for name, start in NOISE:
        logger = logging.getLogger(name)
        if not any(isinstance(f, _StartsWith) for f in logger.filters):
            logger.addFilter(_StartsWith(start))


class _StartsWith(logging.Filter):
    def __init__(self, start: str):
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)


def require_torchao() -> None:
    """RuntimeError if torchao is not installed or does not load."""
    way = f"install it with `{INSTALL}`, or use --mixed_precision bf16"
    if find_spec("torchao") is None:
        raise RuntimeError(f"--mixed_precision fp8 without --use_te needs torchao: {way}")
    try:
        _float8()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        said = first_line(error)
        raise RuntimeError(f"--mixed_precision fp8: torchao does not load ({said}); {way}") from None


def _float8() -> Any:
    silence_import()
    return importlib.import_module("torchao.float8")


def linear_names(model: nn.Module) -> list[str]:
    """Names, as in the coverage table, of the linear layers that can be given a recipe."""
    return [name for name, module in _block_modules(model) if isinstance(module, nn.Linear)]


def _block_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    inside = {id(module) for block in model.blocks for module in block.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) in inside]


def convert(
    model: nn.Module,
    recipe_of: Callable[[str], str | None],
    *,
    emulated: bool,
    all_gather: bool = False,
    fp32_scales: bool = False,
) -> None:
    """Give linear layers of `model.blocks` the recipe of their name; None or "bf16" leaves one as it is.

    On the meta device or not, before sharding; parameters keep names, shapes and dtypes. A layer left out
    though it has a recipe gets `fp8_left_out`, the reason; a converted one `fp8_recipe`. `emulated` computes
    GEMMs of FP8 values in FP32. `all_gather` lets FSDP2 gather weights in FP8, tensorwise alone. With
    `fp32_scales` no recipe rounds scales to powers of two. ValueError if no layer can be converted.
    """
    float8 = _float8()
    wanted = {name: recipe_of(name) for name in linear_names(model)}
    wanted = {name: recipe for name, recipe in wanted.items() if recipe not in (None, "bf16")}
    modules = dict(model.named_modules())
    left_out = {}
    added_to = {f"{name}.{ADDED_TO.get(type(module).__name__)}" for name, module in modules.items()}
    for name in wanted:
        reason = "transformers adds to its output in place" if name in added_to else None
        if reason := reason or why_not_fp8(modules[name]):
            left_out[name] = modules[name].fp8_left_out = reason
    if len(left_out) == len(wanted) and (wanted or not linear_names(model)):
        raise ValueError(_nothing_to_convert(model, left_out))
    for recipe in TORCHAO_RECIPES:
        chosen = {name for name in wanted if wanted[name] == recipe and name not in left_out}
        if not chosen:
            continue
        settings = float8.Float8LinearConfig.from_recipe_name(recipe)
        gathered = all_gather and RECIPES[recipe].fp8_all_gather
        settings = replace(settings, emulate=emulated, enable_fsdp_float8_all_gather=gathered)
        if fp32_scales:
            settings = replace(settings, round_scales_to_power_of_2=False)
        float8.convert_to_float8_training(
            model, config=settings, module_filter_fn=lambda module, name, chosen=chosen: name in chosen
        )
        for name in chosen:
            linear = model.get_submodule(name)
            linear.fp8_recipe = recipe
            if emulated:
                linear.__class__ = _emulated_linear()


def why_not_fp8(linear: nn.Linear) -> str | None:
    """Why a linear layer cannot run in FP8, or None."""
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} computes in a way of its own"
    odd = [
        f"{name} {size}"
        for name, size in (("inputs", linear.in_features), ("outputs", linear.out_features))
        if size % FEATURE_MULTIPLE
    ]
    return f"{', '.join(odd)}: no multiple of {FEATURE_MULTIPLE}" if odd else None


def _nothing_to_convert(model: nn.Module, left_out: dict[str, str]) -> str:
    way = "use --mixed_precision bf16, or --use_te if it has this model"
    who = f"--mixed_precision fp8: {type(model.model).__name__}"
    if left_out:
        reasons = "; ".join(f"{n} x {reason}" for reason, n in Counter(left_out.values()).items())
        return f"{who}: none of its {len(left_out)} linear layers can run in FP8 ({reasons}); {way}"
    found = Counter(
        type(module).__name__
        for _, module in _block_modules(model)
        if any(p.ndim >= 2 for p in module.parameters(recurse=False))
    )
    layers = ", ".join(f"{n} x {name}" for name, n in found.items()) or "nothing"
    return f"{who}: torchao converts nn.Linear, and its decoder layers multiply with {layers}; {way}"


@cache
def _emulated_linear() -> type[nn.Module]:
    """Float8Linear, which asks for the GPU's autocast alone, under the CPU's too.

    FP32 weights are rounded to the autocast dtype first, so that the same values are quantised as where
    weights are kept, or gathered, in BF16. A class, since layers with forwards of their own share no graph.
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
    """Have optimizer steps take the scales of all weights gathered in FP8, in one exchange between ranks."""
    precompute = _float8().precompute_float8_dynamic_scale_for_fsdp
    optimizer.register_step_post_hook(lambda *_: precompute(model))
