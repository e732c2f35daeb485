"""Actual precision of each module, determined from the modules after a step, not from the settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fp8_suite.core.recipes import RECIPES
from fp8_suite.training.precision.recipes import recipe_name
from torch import nn


@dataclass(frozen=True)
class CoverageRow:
    """Modules that ran in the same precision, one line of the table."""

    modules: str  # name with * for layer numbers: layers.*.self_attention.proj
    count: int
    precision: str
    gemm_share: float  # share of the FLOPs of all weight GEMMs; QK^T and PV are not counted
    note: str = ""  # reason that FP8 was requested but not used, or used in part


@dataclass(frozen=True)
class Coverage:
    """Precision of all GEMM modules in a step."""

    rows: list[CoverageRow]
    fp8_modules: int
    fp8_gemm_share: float

    def lines(self) -> list[str]:
        """Format the table to print after the first step."""
        name_width = max(len(row.modules) for row in self.rows)
        precision_width = max(14, *(len(row.precision) for row in self.rows))
        body = [
            f"  {row.modules:<{name_width}}  x{row.count:<4} {row.precision:<{precision_width}} "
            f"{row.gemm_share:6.1%} of GEMMs{f' ({row.note})' if row.note else ''}"
            for row in self.rows
        ]
        total = f"FP8 ran in {self.fp8_modules} modules: {self.fp8_gemm_share:.1%} of GEMM FLOPs"
        return [f"precision coverage of the first step; {total}", *body]


def fold_layers(name: str) -> str:
    """Replace layer numbers in a module's name with *."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


Modules = tuple[dict[tuple[str, str, str], list[int]], float]  # weight elements by row; number of FP8 ones


def coverage(
    model: nn.Module,
    unquantized: str = "bf16",
    gather: Callable[[Modules], list[Modules]] | None = None,
) -> Coverage:
    """Return the precision of each module's GEMMs in the last step; `gather` adds those of other ranks.

    `unquantized` is the precision of GEMMs without a recipe. FLOPs are estimated by the number of weight
    elements, since all weights process the same tokens. Experts process fewer, so their share is overstated.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    fp8_elements = 0.0
    local = _modules(model, unquantized)
    for modules, elements in gather(local) if gather else [local]:
        fp8_elements += elements
        for row, sizes in modules.items():
            groups[row] = groups.get(row, []) + sizes
    total = sum(map(sum, groups.values()))
    rows = [
        CoverageRow(name, len(sizes), label, sum(sizes) / total, note)
        for (name, label, note), sizes in groups.items()
    ]
    fp8_modules = sum(row.count for row in rows if row.precision.startswith("fp8"))
    return Coverage(rows, fp8_modules, fp8_elements / total)


def _modules(model: nn.Module, unquantized: str) -> Modules:
    groups: dict[tuple[str, str, str], list[int]] = {}
    fp8_elements = 0.0
    for name, module in model.named_modules():
        # ZeRO-3 replaces a weight by an empty tensor with its shape in `ds_shape`.
        shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        elements = sum(shape.numel() for shape in shapes if len(shape) >= 2)
        is_attention = type(module).__name__ == "DotProductAttention"
        if isinstance(module, nn.Embedding) or not (elements or is_attention):
            continue
        recipe, note = _last_recipe(module, is_attention), getattr(module, "bf16_reason", "")
        label = f"fp8 {recipe}" if recipe else unquantized
        if recipe and RECIPES[recipe].bf16_wgrad:
            note = "gradients of weights in BF16"
            fp8_elements += elements * (2 / 3)
        elif recipe:
            fp8_elements += elements
        groups.setdefault((fold_layers(name), label, note), []).append(elements)
    return groups, fp8_elements


def _last_recipe(module: nn.Module, is_attention: bool) -> str | None:
    """Return the recipe of a module's last forward pass, or None. torchao layers always run in FP8."""
    if recipe := getattr(module, "fp8_recipe", None):
        return recipe
    if is_attention or not (getattr(module, "fp8", False) and getattr(module, "fp8_initialized", False)):
        return None
    return recipe_name(module.fp8_meta["recipe"])
