"""FP8 autocast, delayed scaling and recomputation of the emulated layers, following TE 2.20.

Delayed scaling casts with scales from earlier steps and records each tensor's amax in row 0 of its history.
At the end of the outermost autocast, the histories of the forward tensors advance by one row and give new
scales. The histories of the gradients advance when backward has finished the first FP8 layer.

n quantized tensors, D input features, E output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from fp8_suite.te_models.emulation.casts import FLOAT32_MAX, Quantized
from fp8_suite.te_models.emulation.recipes import DelayedScaling, Kind, Operand, Recipe, Slot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Direction = Literal["scaling_fwd", "scaling_bwd"]
# TE keeps state per GEMM for input, weight and output forward, and for the gradients of output and input.
TENSORS: dict[Direction, int] = {"scaling_fwd": 3, "scaling_bwd": 2}


class DelayedState:
    """Scales [n] and amax history [steps, n] of n tensors in float32, with TE's attribute names."""

    def __init__(self, tensors: int, steps: int, device: torch.device):
        self.scale = torch.ones(tensors, device=device, dtype=torch.float32)
        self.amax_history = torch.zeros(steps, tensors, device=device, dtype=torch.float32)


@dataclass
class Gemm:
    """Quantization of a linear layer's GEMM operands in one pass; slots are for delayed scaling only."""

    recipe: Recipe
    input: Slot | None = None
    weight: Slot | None = None
    weight_in_backward: Slot | None = None
    grad: Slot | None = None
    finish: Callable[[], None] | None = None  # runs after the backward pass
    # Called with each cast that the forward and dgrad GEMMs read, for FP8 statistics.
    observe: Callable[[Tensor, Kind, Quantized], None] | None = None

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        """Return x [M, N] as an operand that reports its casts to `observe`; see `Recipe.quantize`."""
        operand = self.recipe.quantize(x, kind, slot, amax)

        def observed(dim: int) -> Quantized:
            cast = operand(dim)
            if dim == 1:  # the cast that the forward and dgrad GEMMs read; 0 is wgrad's
                self.observe(x, kind, cast)
            return cast

        return observed if self.observe else operand


@dataclass
class Region:
    """Modules with delayed scaling inside one outermost autocast, in execution order."""

    modules: dict[Fp8Module, None] = field(default_factory=dict)
    group: Any = None  # ranks with these modules; None: all
    has_first: bool = False  # True if a module is assigned to update the gradients' scales


class GlobalState:
    """State shared by all modules: the innermost autocast's recipe, the outermost's region, recomputation."""

    recipe: Recipe | None = None
    region: Region | None = None
    recorded: dict[Fp8Module, list[Tensor]] | None = None  # scales [n] of each module call in the first pass
    replaying: bool = False  # True during recomputation, which uses the recorded scales


@contextmanager
def autocast(
    enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    """Run FP8 layers in `recipe`; nested contexts override outer ones, but for the outermost's group."""
    assert recipe or not enabled, "TE would use its default recipe"
    outer, is_outermost = GlobalState.recipe, GlobalState.region is None
    GlobalState.recipe = recipe if enabled else None
    region = GlobalState.region = GlobalState.region or Region(group=amax_reduction_group)
    try:
        yield
    finally:
        GlobalState.recipe = outer
        if is_outermost:
            GlobalState.region = None
    if is_outermost and enabled and torch.is_grad_enabled():
        update_scales(region.modules, "scaling_fwd", region.group)


class Fp8Module(nn.Module):
    """Module with FP8 GEMMs and the state attributes of TE's modules."""

    num_gemms = 1

    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {}
        self.fsdp2 = False  # set by the layer

    def initialize(self, device: torch.device) -> Recipe:
        """Allocate state for the current recipe and return the recipe."""
        recipe = GlobalState.recipe
        self.fp8 = self.fp8_initialized = recipe is not None
        if recipe is None:
            return Recipe()
        self.fp8_meta["recipe"] = recipe
        for direction, tensors in TENSORS.items():
            if not isinstance(recipe, DelayedScaling):
                self.fp8_meta.pop(direction, None)
            elif direction not in self.fp8_meta:
                state = DelayedState(tensors * self.num_gemms, recipe.amax_history_len, device)
                self.fp8_meta[direction] = state
        return recipe

    def gemms(self, x: Tensor) -> list[Gemm]:
        """Return the quantization of each linear layer for a forward pass over `x`."""
        recipe, replaying = self.initialize(x.device), GlobalState.replaying
        if not isinstance(recipe, DelayedScaling):
            return [Gemm(recipe) for _ in range(self.num_gemms)]
        forward, backward = (self.fp8_meta[direction] for direction in TENSORS)
        scale = GlobalState.recorded[self].pop(0) if replaying else forward.scale.clone()
        if GlobalState.recorded is not None and not replaying:
            GlobalState.recorded.setdefault(self, []).append(scale)
        # The scales of this forward pass, for casts that have recorded their amax.
        fixed = [Slot(value) for value in scale]
        slots = fixed if replaying else _slots(scale, forward)
        # With FSDP2, TE keeps no quantized weight; backward casts the gathered weight with the new scales.
        weights = _slots(forward.scale, forward) if self.fsdp2 else fixed
        grads = _slots(backward.scale, backward)
        gemms = [
            Gemm(
                recipe,
                input=slots[3 * i],
                weight=slots[3 * i + 1],
                weight_in_backward=weights[3 * i + 1],
                grad=grads[2 * i],
            )
            for i in range(self.num_gemms)
        ]
        gemms[0].finish = self._update_after_backward(x, replaying=replaying)
        return gemms

    def _update_after_backward(self, x: Tensor, *, replaying: bool) -> Callable[[], None] | None:
        """Return a function to update the gradients' scales after this module's backward pass, or None."""
        if replaying:
            # Reentrant recomputation runs its own backward pass; non-reentrant never calls `finish`.
            return partial(update_scales, [self], "scaling_bwd")
        region = GlobalState.region
        region.modules[self] = None
        needs_grad = x.requires_grad or any(p.requires_grad for p in self.parameters(recurse=False))
        if region.has_first or not (torch.is_grad_enabled() and needs_grad):
            return None
        region.has_first = True
        return partial(update_scales, region.modules, "scaling_bwd", region.group)


def _slots(scale: Tensor, state: DelayedState) -> list[Slot]:
    """Pair scales [n] with row 0 of the history, which records amaxes."""
    return [Slot(*pair) for pair in zip(scale, state.amax_history[0], strict=True)]


@torch.no_grad()
def update_scales(modules: Iterable[Fp8Module], direction: Direction, group: Any = None) -> None:
    """Advance the modules' histories and compute new scales; collective in a distributed run."""
    if not (metas := [module.fp8_meta for module in modules]):
        return
    recipe, states = metas[0]["recipe"], [meta[direction] for meta in metas]  # all have the same recipe
    widths = [len(state.scale) for state in states]
    history = torch.cat([state.amax_history for state in states], dim=1)  # [steps, n of all modules]
    scale = torch.cat([state.scale for state in states])
    amax = history[0].clone()
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    limit = torch.finfo(recipe.fp8_format.dtype("grad" if direction == "scaling_bwd" else "input")).max
    history, scale = next_scales(history, amax, scale, limit=limit)
    for state, rows, scales in zip(states, history.split(widths, 1), scale.split(widths), strict=True):
        state.amax_history.copy_(rows)
        state.scale.copy_(scales)


def next_scales(history: Tensor, amax: Tensor, scale: Tensor, *, limit: float) -> tuple[Tensor, Tensor]:
    """Return history [steps, n] and scales [n] after a step with `amax` [n]; scales map amax to `limit`.

    As in TE's kernel, row 0 is being recorded, row 1 is the oldest and the last row the most recent. Unused
    tensors (amax 0) keep their history and scale, a scale that cannot be computed stays unchanged, and scales
    are clamped to float32's maximum.
    """
    rolled = history.roll(-1, 0)
    rolled[-1] = amax
    largest = rolled.amax(0)  # with the oldest row, which is dropped next
    rolled[0] = 0.0
    used = amax != 0
    computable = used & largest.isfinite() & (largest > 0)
    new = (torch.full_like(largest, limit) / largest).clamp(max=FLOAT32_MAX)
    return torch.where(used, rolled, history), torch.where(computable, new, scale)


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Checkpoint activations as in torch, but recompute with the FP8 scales of the first pass."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    recorded: dict[Fp8Module, list[Tensor]] = {}
    recipe = GlobalState.recipe

    @contextmanager
    def one_pass(*, replaying: bool) -> Iterator[None]:
        outer = GlobalState.recorded, GlobalState.replaying
        with autocast(enabled=recipe is not None, recipe=recipe) if replaying else nullcontext():
            GlobalState.recorded, GlobalState.replaying = recorded, replaying
            try:
                yield
            finally:
                GlobalState.recorded, GlobalState.replaying = outer

    if not use_reentrant:
        contexts = one_pass(replaying=False), one_pass(replaying=True)
        # Like TE's, the second pass runs to its end, where `te_models.recompute` checks it.
        settings = {"use_reentrant": False, "early_stop": False, "context_fn": lambda: contexts}
        return torch_checkpoint(function, *args, **settings, **kwargs)

    def run(*inputs: Any) -> Any:
        with one_pass(replaying=torch.is_grad_enabled()):
            return function(*inputs, **kwargs)

    return torch_checkpoint(run, *args, use_reentrant=True)
