"""Settings of precision and FP8 recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.recipes import RECIPES, TE_RECIPES, TORCHAO_RECIPES
from fp8_suite.core.settings import Section, nearest, resumable, setting

RECIPE_SETTINGS = frozenset().union(*(spec.settings for spec in RECIPES.values()))
MAP_SETTINGS = ("precision_map", "bf16_first_layers", "bf16_last_layers")  # choose a recipe by module
MOMENT_DTYPES = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """precision of GEMMs, master weights and moments"""

    mixed_precision: Literal["bf16", "fp8", "fp16", "fp32"] = setting(
        "bf16", "precision of the GEMMs; fp16 scales the loss dynamically"
    )
    fp8_scenario: Literal[("default", *RECIPES)] = setting(
        "default", "FP8 recipe; default: delayed with --use_te, else tensorwise (torchao)"
    )
    bf16_first_layers: int = setting(0, "first decoder layers to keep in BF16", minimum=0)
    bf16_last_layers: int = setting(0, "last decoder layers to keep in BF16", minimum=0)
    precision_map: str | None = setting(
        None,
        "PATTERN=RECIPE,...: by module, a recipe or bf16 (layers.*.self_attention=bf16); default: none",
    )
    fp8_fallback: Literal["warn", "error"] = setting(
        "warn", "if mxfp8 or nvfp4 cannot run here: warn and use delayed scaling, or raise an error"
    )
    fp8_format: Literal["hybrid", "e4m3"] = setting(
        "hybrid", "FP8 format; hybrid: E4M3 forward, E5M2 backward"
    )
    fp8_amax_history_len: int = setting(
        1024,
        "delayed scaling: micro-batches whose largest amax gives the scale; 1: only the most recent",
        minimum=1,
        maximum=2**16,
    )
    fp8_fast_accumulation: bool = setting(False, "fast accumulation in backward GEMMs too (delayed, current)")
    fp8_fp32_scales: bool = setting(False, "FP32 scales instead of powers of two (rowwise; block on Hopper)")
    fp8_lm_head: bool = setting(False, "run the LM head's GEMMs in FP8")
    master_weights: Literal["fp32", "none"] = setting(
        "fp32", "FP32 master weights; none: BF16 weights only, which lose small updates"
    )
    moment_dtype: str = setting(
        "fp32",
        "Adam moments: fp32 (8 bytes per parameter), bf16, fp16 (4), fp8 (2), or FIRST,SECOND (fp8,fp16)",
    )
    fp8_weights: bool = resumable(
        False,
        "keep linear weights only in FP8 on the GPU; needs --lora_rank, or one GPU and --offload_optimizer",
    )


def changed_recipe_settings(settings: Any) -> dict[str, Any]:
    """Return the recipe settings that differ from their defaults."""
    default = vars(PrecisionConfig())
    values = {name: value for name, value in vars(settings).items() if name in RECIPE_SETTINGS}
    return {name: value for name, value in values.items() if value != default[name]}


def unread_settings(settings: Any, recipes: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (setting, reason) for each changed setting that none of these recipes reads."""
    for name in changed_recipe_settings(settings):
        readers = [recipe for recipe, spec in RECIPES.items() if name in spec.settings]
        if not recipes & set(readers):
            yield name, f"applies to {', '.join(readers)}, not to {', '.join(sorted(recipes))}; drop it"


def parse_moment_dtype(text: str) -> tuple[str, str]:
    """Return the formats of the first and second moment. UserError for another one."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in MOMENT_DTYPES]
    if unknown or len(names) > 2:
        hint = nearest(unknown[0].lower(), MOMENT_DTYPES) if unknown else ""
        raise bad_setting(f"not one of {', '.join(MOMENT_DTYPES)}, or two of them{hint}", moment_dtype=text)
    return names[0], names[-1]


def parse_precision_map(text: str | None, *, use_te: bool) -> list[tuple[str, str]]:
    """Return (pattern, recipe) pairs of --precision_map. UserError for an invalid entry."""
    recipes, condition = (TE_RECIPES, "with --use_te") if use_te else (TORCHAO_RECIPES, "without --use_te")
    entries = []
    for entry in () if text is None else text.split(","):
        pattern, _, recipe = (part.strip() for part in entry.partition("="))
        if not (recipe and all(pattern.split("."))) or "=" in recipe:
            reason = f"{entry.strip()!r} is not PATTERN=RECIPE (layers.0=bf16)"
            raise bad_setting(reason, precision_map=text)
        if recipe not in (*recipes, "bf16"):
            reason = f"{recipe}: {condition} a module runs in one of {', '.join(recipes)}, bf16"
            raise bad_setting(reason + nearest(recipe, (*recipes, "bf16")), precision_map=text)
        entries.append((pattern, recipe))
    return entries
