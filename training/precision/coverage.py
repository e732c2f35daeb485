"""Precision that each module really ran in: read off the modules after a step, not off the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from core.recipes import RECIPES
from training.precision.precision_map import fold_layers
from training.precision.recipes import Precision, recipe_name


@dataclass(frozen=True)
class CoverageRow:
    modules: str  # names with layer numbers folded: layers.*.self_attention.proj
    count: int
    precision: str
    gemm_share: float  # share of all weight GEMMs' FLOPs; attention's own products are not counted
    note: str = ""  # part that is not in FP8 although it was requested, and why


@dataclass(frozen=True)
class Coverage:
    rows: list[CoverageRow]
    fp8_modules: int
    fp8_gemm_share: float

    def lines(self) -> list[str]:
        """Format the table that is printed after the first step."""
        width = max(len(row.modules) for row in self.rows)
        wide = max(14, *(len(row.precision) for row in self.rows))
        body = [
            f"  {row.modules:<{width}}  x{row.count:<4} {row.precision:<{wide}} {row.gemm_share:6.1%} "
            f"of GEMMs{f' ({row.note})' if row.note else ''}"
            for row in self.rows
        ]
        total = f"FP8 ran in {self.fp8_modules} modules: {self.fp8_gemm_share:.1%} of GEMM FLOPs"
        return [f"precision coverage of the first step; {total}", *body]

    def as_dict(self) -> dict[str, Any]:
        """Return what env.json records."""
        return vars(self) | {"rows": [vars(row) for row in self.rows]}


def coverage(model: nn.Module, precision: Precision) -> Coverage:
    """Read off the modules, after a step, in which precision each one's GEMMs ran.

    A GEMM's FLOPs are proportional to its weight's elements, since every weight sees the same tokens (except
    experts, which see only a fraction of the tokens, so their share is overstated).
    """
    groups: dict[tuple[str, str, str], list[int]] = {}  # elements of the modules of a row
    fp8_elements = 0.0
    for name, module in model.named_modules():
        # ZeRO-3 leaves an empty tensor in a weight's place, with the shape as its attribute.
        shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        elements = sum(shape.numel() for shape in shapes if len(shape) >= 2)
        is_attention = type(module).__name__ == "DotProductAttention"
        if isinstance(module, nn.Embedding) or not (elements or is_attention):
            continue
        recipe, note = _recipe_run(module, is_attention), getattr(module, "fp8_left_out", "")
        ran = f"fp8 {recipe}" if recipe else "fp32" if precision.effective == "fp32" else "bf16"
        if recipe and RECIPES[recipe].bf16_wgrad:
            note = "gradients of weights in BF16"
            fp8_elements += elements * (2 / 3)
        elif recipe:
            fp8_elements += elements
        groups.setdefault((fold_layers(name), ran, note), []).append(elements)
    total = sum(map(sum, groups.values()))
    rows = [CoverageRow(name, len(n), ran, sum(n) / total, note) for (name, ran, note), n in groups.items()]
    fp8_modules = sum(row.count for row in rows if row.precision.startswith("fp8"))
    return Coverage(rows, fp8_modules, fp8_elements / total)


def _recipe_run(module: nn.Module, is_attention: bool) -> str | None:
    """Return the recipe of a module's last forward, or None; a converted torchao layer has no other way."""
    if recipe := getattr(module, "fp8_recipe", None):
        return recipe
    meta = getattr(module, "fp8_meta", {})
    # Attention's own recipe may be composed of two; the global one is what was requested.
    recipe = meta.get("global_recipe", meta.get("recipe"))
    quantized = getattr(module, "fp8", False) and getattr(module, "fp8_initialized", False)
    if quantized and (not is_attention or getattr(recipe, "fp8_dpa", False)):
        return recipe_name(recipe)
    return None
