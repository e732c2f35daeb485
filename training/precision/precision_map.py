"""Precision map: a recipe for each GEMM module.

A pattern has dot-separated parts, each with optional wildcards *, ? and [..]. It matches a module if
consecutive parts of the module's name match the pattern: `layers.0`, `layers.*.self_attention`,
`layers.[0-3]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.settings import matches
from fp8_suite.te_models.backend import te_module
from fp8_suite.training.config import Config
from fp8_suite.training.precision import torchao_fp8
from fp8_suite.training.precision.coverage import fold_layers
from fp8_suite.training.precision.recipes import Precision, make_recipe, why_refused
from fp8_suite.training.precision.settings import MAP_SETTINGS, parse_precision_map
from torch import nn

# GEMM modules of a TE layer, and the sizes of their weights.
TE_GEMMS = {
    "self_attention.layernorm_qkv": ("hidden_size", "query width", "key/value width"),
    "self_attention.proj": ("hidden_size", "query width"),
    "layernorm_mlp": ("hidden_size", "intermediate_size"),
}


HF_LINEARS = {
    "self_attention.layernorm_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.proj": ("self_attn.o_proj",),
    "layernorm_mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def _map_settings(cfg: Config) -> dict[str, Any]:
    """Return the precision-map settings that the user gave."""
    values = {name: getattr(cfg.precision, name) for name in MAP_SETTINGS}
    return {name: value for name, value in values.items() if value not in (None, 0)}


def assign(cfg: Config, names: Sequence[str], num_layers: int) -> dict[str, str]:
    """Return the requested recipe, or "bf16", of each GEMM module in `names`.

    UserError if a pattern matches no module, if rules conflict, or if no module is left in FP8.
    """
    first, last = cfg.precision.bf16_first_layers, cfg.precision.bf16_last_layers
    if first + last >= num_layers:
        reason = f"these are all of the model's {num_layers} layers; use --mixed_precision bf16"
        raise bad_setting(reason, bf16_first_layers=first, bf16_last_layers=last)
    rules = []  # (rule as written, recipe, matching modules)
    for pattern, recipe in parse_precision_map(cfg.precision.precision_map, use_te=cfg.model.use_te):
        rule = f"{pattern}={recipe}"
        rules.append((rule, recipe, [name for name in names if matches(pattern, name)]))
        if not rules[-1][2]:
            folded = ", ".join(dict.fromkeys(map(fold_layers, names)))
            reason = f"no GEMM module has such a name; they are {folded}, with layers 0 to {num_layers - 1}"
            raise bad_setting(reason, precision_map=rule)
    ends = {"bf16_first_layers": range(first), "bf16_last_layers": range(num_layers - last, num_layers)}
    layer_of = {name: next(int(part) for part in name.split(".") if part.isdecimal()) for name in names}
    for flag, layers in ends.items():
        rules.append((f"--{flag} {len(layers)}", "bf16", [n for n in names if layer_of[n] in layers]))
    assigned, rule_of = dict.fromkeys(names, cfg.requested_recipe), {}
    for rule, recipe, modules in rules:
        for name in modules:
            if rule_of.setdefault(name, rule) != rule and assigned[name] != recipe:
                reason = f"{rule_of[name]} and {rule} conflict on {name}; remove one"
                raise bad_setting(reason, **_map_settings(cfg))
            assigned[name] = recipe
    if set(assigned.values()) == {"bf16"}:
        raise bad_setting("no module is left in FP8; use --mixed_precision bf16", **_map_settings(cfg))
    return assigned


def te_names(num_layers: int) -> list[str]:
    """Return the names of a TE model's GEMM modules."""
    return [f"layers.{layer}.{gemm}" for layer in range(num_layers) for gemm in TE_GEMMS]


def resolve_map(cfg: Config, precision: Precision, config: Any) -> Precision:
    """Return `precision` with a recipe for each TE module, if the user gave a map.

    `config` is the model's. The modules of a Hugging Face model are not known yet. UserError for an invalid
    map, or a recipe in it that cannot run here.
    """
    backend = precision.te_backend
    if backend is None or not _map_settings(cfg):
        return precision
    num_layers = config.num_hidden_layers
    requested = assign(cfg, te_names(num_layers), num_layers)
    te_recipe_of = {precision.effective: precision.te_recipe}
    for name in sorted({*requested.values()} - {"bf16", precision.requested, precision.effective}):
        if message := why_refused(name, f"--precision_map ...={name}", backend):
            raise UserError(message, flags=("precision_map",))
        te_recipe_of[name] = make_recipe(name, cfg.precision, backend)
    by_module = {
        module: precision.effective if name == precision.requested else name
        for module, name in requested.items()
    }
    exceptions = sorted(set(by_module.values()) - {cfg.requested_recipe})
    if cfg.sharding.fp8_all_gather and exceptions:
        reason = (
            f"it gathers weights that are all in {cfg.requested_recipe}; drop it, or {', '.join(exceptions)}"
        )
        raise bad_setting(reason, fp8_all_gather=True, **_map_settings(cfg))
    return replace(precision, by_module=by_module, te_recipe_of=te_recipe_of)


def bf16_linears(model: nn.Module, precision: Precision) -> list[str]:
    """Return the Hugging Face names of decoder layers' linear modules that an FP8 run computes in BF16."""
    if not precision.fp8:
        return []
    if precision.te_backend is None:
        names = torchao_fp8.linear_names(model)
        kept = [name for name in names if not hasattr(model.get_submodule(name), "fp8_recipe")]
        return [name.removeprefix("model.") for name in kept]  # the wrapper's
    layers = [name.split(".", 2)[1:] for name, recipe in precision.by_module.items() if recipe == "bf16"]
    return [f"model.layers.{layer}.{linear}" for layer, gemm in layers for linear in HF_LINEARS[gemm]]


def apply(model: nn.Module, precision: Precision, group: Any = None) -> None:
    """Run each TE module in its own recipe, inside the run's autocast. `group`: see `build_autocast`."""
    modules = dict(model.named_modules())
    for name, recipe in precision.by_module.items():
        if recipe != precision.effective and (module := modules.get(name)):  # else on another rank
            region = inner_autocast(precision, precision.te_recipe_of.get(recipe), group)
            module.forward = region(module.forward)


@contextmanager
def inner_autocast(precision: Precision, recipe: Any, group: Any) -> Iterator[None]:
    """Run in `recipe` (None: BF16) inside the run's autocast.

    TE reduces forward amaxes of delayed scaling when the outermost autocast exits. It reduces all backward
    amaxes once, after the backward pass of the first FP8 module. An inner autocast resets TE's first-module
    flag on exit, so every inner module would reduce all amaxes again. Restore the flag to prevent that.
    """
    # With recipe=None TE would build its default recipe on every call.
    inner = te_module(precision.te_backend).autocast(
        enabled=recipe is not None, recipe=recipe or precision.te_recipe, amax_reduction_group=group
    )
    if precision.te_backend != "native":
        with inner:
            yield
        return
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    with inner:
        yield
        is_first = manager.quantization_state.is_first_fp8_module
    manager.quantization_state.is_first_fp8_module = is_first
