"""What really ran in FP8: read off the modules after a step, not off the settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from training.precision.recipes import Precision, recipe_name

# Recipes that run less than all of a module's GEMMs (forward, gradients of inputs and of weights) in FP8.
FP8_GEMMS = {"fp8 rowwise_with_gw_hp": (2 / 3, "gradients of weights in BF16")}


@dataclass(frozen=True)
class CoverageRow:
    modules: str  # names with layer numbers folded: layers.*.self_attention.proj
    count: int
    precision: str
    gemm_share: float  # of the FLOPs of all weight GEMMs; attention's own products are not among them
    note: str = ""  # what of the modules is not in FP8 though they were to be, and why


@dataclass(frozen=True)
class Coverage:
    rows: list[CoverageRow]
    fp8_modules: int
    fp8_gemm_share: float

    def lines(self) -> list[str]:
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
        return {
            "fp8_modules": self.fp8_modules,
            "fp8_gemm_share": self.fp8_gemm_share,
            "rows": [vars(row) for row in self.rows],
        }


def coverage(model: nn.Module, precision: Precision) -> Coverage:
    """Read off the modules, after a step, in which precision each one's GEMMs ran.

    A GEMM's FLOPs are proportional to its weight's elements, since every weight sees the same tokens (but
    experts, which each see some of them, so that their share is told too high).
    """
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, module in model.named_modules():
        # ZeRO-3 leaves an empty tensor where a weight was, and its shape beside it.
        shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        elements = sum(shape.numel() for shape in shapes if len(shape) >= 2)
        is_attention = type(module).__name__ == "DotProductAttention"
        if isinstance(module, nn.Embedding) or not (elements or is_attention):
            continue
        ran = _ran_in(module, precision, is_attention)
        note = FP8_GEMMS[ran][1] if ran in FP8_GEMMS else getattr(module, "fp8_left_out", "")
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", name), ran, note)
        count, total = found.get(key, (0, 0))
        found[key] = (count + 1, total + elements)
    all_elements = sum(total for _, total in found.values())
    rows = [CoverageRow(name, n, ran, e / all_elements, note) for (name, ran, note), (n, e) in found.items()]
    fp8 = [row for row in rows if row.precision.startswith("fp8")]
    share = sum(r.gemm_share * FP8_GEMMS.get(r.precision, (1,))[0] for r in fp8)
    return Coverage(rows, sum(r.count for r in fp8), share)


def _ran_in(module: nn.Module, precision: Precision, is_attention: bool) -> str:
    """`fp8 <recipe>` if TE says that this module's last forward was quantised, else the compute dtype.

    torchao's Float8Linear cannot run in anything but FP8.
    """
    if recipe := getattr(module, "fp8_recipe", None):
        return f"fp8 {recipe}"
    meta = getattr(module, "fp8_meta", {})
    # Attention's own recipe may be made up of two; the global one is what it was asked for.
    recipe = meta.get("global_recipe", meta.get("recipe"))
    quantised = getattr(module, "fp8", False) and getattr(module, "fp8_initialized", False)
    if quantised and (not is_attention or getattr(recipe, "fp8_dpa", False)):
        return f"fp8 {recipe_name(recipe)}"
    return "fp32" if precision.effective == "fp32" else "bf16"
