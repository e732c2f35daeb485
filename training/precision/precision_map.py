"""Precision by layer: which GEMM module runs in which recipe, and how TE modules are made to.

A pattern is dotted, and each of its parts may hold *, ? and [..]. It stands for every module in whose name a
run of dotted parts matches it part by part: `layers.0`, `layers.*.self_attention`, `layers.[0-3]`, `proj`.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from core.recipes import FALLBACK_RECIPE, RECIPES, TE_RECIPES, TORCHAO_RECIPES
from core.settings import nearest
from te_models.engine import engine
from training.config import Config
from training.precision.recipes import (
    Precision,
    make_recipe,
    odd_sizes,
    usable,
)

# The GEMM modules of a TE layer, and the sizes that their weights have (names of `check_sizes`).
TE_GEMMS = {
    "self_attention.layernorm_qkv": ("hidden_size", "query width", "key/value width"),
    "self_attention.proj": ("hidden_size", "query width"),
    "layernorm_mlp": ("hidden_size", "intermediate_size"),
}


@dataclass(frozen=True)
class Wish:
    """One setting's say: the modules that `matches` knows by name are to run in `recipe`."""

    said: str  # as the user wrote it
    recipe: str
    matches: Callable[[str], bool]


def asked_for(cfg: Config) -> bool:
    own = cfg.precision
    return own.precision_map is not None or own.bf16_first_layers > 0 or own.bf16_last_layers > 0


def parse(text: str, *, use_te: bool) -> list[tuple[str, str]]:
    """--precision_map's patterns and recipes; ValueError for anything that is not PATTERN=RECIPE."""
    flag, (own, other) = f"--precision_map {text}", (TE_RECIPES, TORCHAO_RECIPES)
    if not use_te:
        own, other = other, own
    entries = []
    for entry in text.split(","):
        pattern, equals, recipe = (part.strip() for part in entry.partition("="))
        if not (equals and recipe and all(pattern.split("."))) or "=" in recipe:
            raise ValueError(f"{flag}: {entry.strip()!r} is not PATTERN=RECIPE (layers.0=bf16)")
        if recipe not in (*own, "bf16"):
            how = f" is one {'without' if use_te else 'of'} --use_te" if recipe in other else " is no recipe"
            hint = nearest(recipe, (*own, "bf16")) if recipe not in other else ""
            raise ValueError(
                f"{flag}: {recipe}{how}; {'with' if use_te else 'without'} --use_te a module runs in one of "
                f"{', '.join(own)}, bf16{hint}"
            )
        entries.append((pattern, recipe))
    return entries


def matches(pattern: str, name: str) -> bool:
    """Whether some run of consecutive dotted parts of `name` matches the pattern's parts one by one."""
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def _given(cfg: Config) -> str:
    """The settings that choose by layer, as the user gave them."""
    flags = ("precision_map", "bf16_first_layers", "bf16_last_layers")
    return " ".join(
        f"--{name} {getattr(cfg.precision, name)}" for name in flags if getattr(cfg.precision, name)
    )


def _refuse_without_fp8(cfg: Config) -> None:
    if cfg.precision.mixed_precision != "fp8":
        raise ValueError(
            f"{_given(cfg)}: only --mixed_precision fp8 has layers to choose for (here "
            f"{cfg.precision.mixed_precision}); choose fp8, or drop it"
        )


def _wishes(cfg: Config, num_layers: int) -> list[Wish]:
    own = cfg.precision
    first, last = own.bf16_first_layers, own.bf16_last_layers
    if first + last >= num_layers:
        raise ValueError(
            f"--bf16_first_layers {first} --bf16_last_layers {last}: all of the model's {num_layers} layers; "
            "use --mixed_precision bf16"
        )
    wishes = [
        Wish(f"--bf16_first_layers {first}", "bf16", lambda name: _layer(name) in range(first)),
        Wish(
            f"--bf16_last_layers {last}",
            "bf16",
            lambda name: _layer(name) in range(num_layers - last, num_layers),
        ),
    ]
    text = own.precision_map
    for pattern, recipe in parse(text, use_te=cfg.model.use_te) if text is not None else ():
        wishes.append(Wish(f"{pattern}={recipe}", recipe, functools.partial(matches, pattern)))
    return wishes


def _layer(name: str) -> int | None:
    """The decoder layer that a module is in: the first number among its name's parts."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def folded(names: Sequence[str]) -> list[str]:
    """Names without repetition, layer numbers as *."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def assign(cfg: Config, names: Sequence[str], num_layers: int) -> dict[str, str]:
    """The recipe, or "bf16", that the settings ask for in each of a model's GEMM modules `names`.

    ValueError for a pattern that matches none, for settings that disagree on one, and where none is in FP8.
    """
    if not asked_for(cfg):
        return dict.fromkeys(names, cfg.recipe)
    wishes = _wishes(cfg, num_layers)
    assigned, heard = {}, set()
    for name in names:
        said = [wish for wish in wishes if wish.matches(name)]
        heard.update(wish.said for wish in said)
        if len({wish.recipe for wish in said}) > 1:
            raise ValueError(
                f"--precision_map: {' and '.join(wish.said for wish in said)} disagree on {name}; leave one "
                "of them out there"
            )
        assigned[name] = said[0].recipe if said else cfg.recipe
    for wish in wishes[2:]:
        if wish.said not in heard:
            raise ValueError(
                f"--precision_map {wish.said}: no GEMM module has such a name; they are "
                f"{', '.join(folded(names))}, with layers 0 to {num_layers - 1}"
            )
    if set(assigned.values()) == {"bf16"}:
        raise ValueError("--precision_map: no module is left in FP8; use --mixed_precision bf16")
    return assigned


def te_names(num_layers: int) -> list[str]:
    """The GEMM modules of a TE model."""
    return [f"layers.{layer}.{gemm}" for layer in range(num_layers) for gemm in TE_GEMMS]


def resolve(cfg: Config, precision: Precision, config: Any) -> Precision:
    """`precision` with each TE module's own recipe, if the settings name any; `config`: the model's.

    Recipes that cannot run here fall back or stop as --fp8_scenario's does. ValueError for settings that
    make no sense; those of a Hugging Face model, whose modules are not known yet, as far as they can be read.
    """
    if not asked_for(cfg):
        return precision
    _refuse_without_fp8(cfg)
    if precision.te_backend is None:
        if cfg.precision.precision_map is not None:
            parse(cfg.precision.precision_map, use_te=False)
        return precision
    num_layers = config.num_hidden_layers
    assigned, runs, fallbacks = assign(cfg, te_names(num_layers), num_layers), {}, {}
    for name in dict.fromkeys(assigned.values()):
        if name == precision.requested:
            runs[name] = precision.effective
        elif name != "bf16":
            flag = f"--precision_map ...={name}"
            runs[name], reason = usable(name, flag, cfg, precision.te_backend)
            if reason:
                fallbacks[name] = reason
    by_module = {module: runs.get(name, name) for module, name in assigned.items()}
    recipes = {
        name: precision.recipe
        if name == precision.effective
        else make_recipe(name, cfg.precision, precision.te_backend)
        for name in runs.values()
    }
    resolved = replace(precision, by_module=by_module, recipes=recipes, map_fallbacks=fallbacks)
    _refuse_mixes(cfg, resolved, num_layers)
    return resolved


def _refuse_mixes(cfg: Config, precision: Precision, num_layers: int) -> None:
    """ValueError for what TE cannot mix."""
    ran = precision.by_module
    if cfg.sharding.fp8_all_gather and set(ran.values()) != {"current"}:
        raise ValueError(
            "--fp8_all_gather keeps every GEMM weight in FP8, scaled by its own largest value; with it "
            f"{_given(cfg)} cannot have {', '.join(sorted(set(ran.values()) - {'current'}))}; drop one"
        )
    for layer in range(num_layers if cfg.precision.fp8_attention else 0):
        attention = f"layers.{layer}.self_attention"
        qkv, proj = (ran[f"{attention}.{gemm}"] for gemm in ("layernorm_qkv", "proj"))
        if qkv != proj:
            raise ValueError(
                f"--fp8_attention: TE hands attention's output to {attention}.proj in FP8, so it must run in "
                f"what {attention}.layernorm_qkv runs in (here {proj} and {qkv}); use a pattern for all of "
                f"{attention}, or drop --fp8_attention"
            )


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int]) -> None:
    """ValueError naming the modules whose GEMMs cannot run in the recipe that is theirs."""
    for module, recipe in precision.by_module.items():
        own = {name: sizes[name] for name in TE_GEMMS[module.split(".", 2)[2]]}
        if recipe != "bf16" and (odd := odd_sizes(recipe, own)):
            raise ValueError(
                f"--model_name {model_name}: {module} cannot run in {recipe}: "
                f"{', '.join(odd)} not a multiple of {RECIPES[recipe].feature_multiple}; give it another "
                "recipe, or bf16 (--precision_map)"
            )


def check_resume(meta: dict[str, Any], precision: Precision) -> None:
    """ValueError if the checkpoint ran other recipes in the place of the map's."""
    there, here = (sorted(names) for names in (meta.get("map_fallbacks", {}), precision.map_fallbacks))
    if there != here:
        raise ValueError(
            f"--resume: of --precision_map's recipes {FALLBACK_RECIPE} replaced {', '.join(there) or 'none'} "
            f"there, {', '.join(here) or 'none'} here; resume on the same kind of GPU, or start a new run "
            "from its exported model"
        )


def apply(model: nn.Module, precision: Precision, *, fp8_attention: bool) -> None:
    """Make TE modules run in their own recipes, whatever the autocast around them.

    With FP8 attention that is all of a layer's self_attention, whose parts hand each other FP8 tensors.
    """
    for name, recipe in precision.by_module.items():
        if recipe == precision.effective:
            continue
        whole, _, part = name.rpartition(".")
        if fp8_attention and whole.endswith("self_attention"):
            if part == "proj":
                continue
            name = whole
        module = model.get_submodule(name)
        module.forward = _inside(module.forward, precision, precision.recipes.get(recipe))


def _inside(forward: Callable, precision: Precision, recipe: Any) -> Callable:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _own_autocast(precision, recipe):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _own_autocast(precision: Precision, recipe: Any) -> Iterator[None]:
    """`recipe` (None: BF16) inside the run's autocast.

    Delayed scaling's forward amaxes are reduced where the outermost autocast ends, each by its own recipe,
    whatever the outermost one's. The backward ones are, all at once, after the backward of the module that
    ran first in FP8. TE forgets at the end of an inner autocast that there was a first one, so that every
    inner module would be it and reduce all amaxes: what TE knows is carried over.
    """
    # With recipe=None TE would build its default recipe at every call.
    inner = engine(precision.te_backend).autocast(
        enabled=recipe is not None, recipe=recipe or precision.recipe
    )
    if precision.te_backend != "native":
        with inner:
            yield
        return
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    with inner:
        yield
        first_is_to_come = manager.quantization_state.is_first_fp8_module
    manager.quantization_state.is_first_fp8_module = first_is_to_come
