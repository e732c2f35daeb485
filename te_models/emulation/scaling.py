"""FP8 autocast, delayed scaling's state and recomputation of the emulated layers, after TE 2.20's.

Delayed scaling casts with scales that earlier steps left, and notes each tensor's amax in row 0 of a history.
When the outermost autocast of a forward pass ends, the histories of its forward tensors move on by one row
and give new scales; those of the gradients do when its backward pass has come back to the first FP8 layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_models.emulation.casts import FLOAT32_MAX
from te_models.emulation.recipes import DelayedScaling, Recipe, Slot

Direction = Literal["scaling_fwd", "scaling_bwd"]
# TE counts a GEMM's input, weight and output forward, and the gradients of output and input backward.
TENSORS: dict[Direction, int] = {"scaling_fwd": 3, "scaling_bwd": 2}


class DelayedState:
    """`scale` [N] and `amax_history` [steps, N], float32, under the names that checkpoints know."""

    def __init__(self, tensors: int, steps: int, device: torch.device):
        self.scale = torch.ones(tensors, device=device, dtype=torch.float32)
        self.amax_history = torch.zeros(steps, tensors, device=device, dtype=torch.float32)

    def resize(self, steps: int) -> None:
        """Keep the history's latest rows, as TE does for a recipe with another length."""
        have, width = self.amax_history.shape
        if steps != have:
            rows = self.amax_history[:steps]
            self.amax_history = torch.cat([rows, rows.new_zeros(max(0, steps - have), width)])


@dataclass
class Gemms:
    """How one linear of this forward pass is quantized; without slots for recipes that keep no state."""

    recipe: Recipe
    input: Slot | None = None
    weight: Slot | None = None
    grad: Slot | None = None
    requantize: Slot | None = None  # of the weight in backward; None: with the forward pass's scale
    finish: Callable[[], None] | None = None  # after the backward pass


class Region:
    """What ran in FP8 with delayed scaling inside one outermost autocast, in order."""

    def __init__(self):
        self.modules: dict[Fp8Module, None] = {}
        self.first_taken = False

    def take_first(self) -> bool:
        taken, self.first_taken = self.first_taken, True
        return not taken


class Now:
    """The innermost autocast, its outermost one's region, and the checkpointed pass that is running."""

    recipe: Recipe | None = None
    depth = 0
    region: Region | None = None
    checkpointed: Pass | None = None


class autocast(AbstractContextManager):
    """Run FP8 layers by `recipe`; contexts nest, and the inner one counts."""

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None):
        if enabled and recipe is None:
            raise ValueError("autocast(enabled=True) needs a recipe")
        self.recipe = recipe if enabled else None

    def __enter__(self) -> autocast:
        self.outer = Now.recipe
        if Now.depth == 0:
            Now.region = Region()
        Now.recipe, Now.depth = self.recipe, Now.depth + 1
        return self

    def __exit__(self, *exception: Any) -> None:
        Now.recipe, Now.depth = self.outer, Now.depth - 1
        if Now.depth:
            return
        region, Now.region = Now.region, None
        if self.recipe and torch.is_grad_enabled():
            update_scales(region.modules, "scaling_fwd")


class Fp8Module(nn.Module):
    """A module with FP8 GEMMs, and what TE's modules tell about themselves."""

    num_gemms = 1

    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {}
        self.fsdp2 = False  # told by the layer that is sharded

    def initialize(self, device: torch.device) -> Recipe | None:
        """The recipe of this pass, with its state allocated; None outside FP8."""
        recipe = Now.recipe
        self.fp8 = self.fp8_initialized = recipe is not None
        if recipe is None:
            return None
        self.fp8_meta["recipe"] = recipe
        for direction, tensors in TENSORS.items():
            if not isinstance(recipe, DelayedScaling):
                self.fp8_meta.pop(direction, None)
            elif direction in self.fp8_meta:
                self.fp8_meta[direction].resize(recipe.amax_history_len)
            else:
                state = DelayedState(tensors * self.num_gemms, recipe.amax_history_len, device)
                self.fp8_meta[direction] = state
        return recipe

    def gemms(self, x: Tensor) -> list[Gemms | None]:
        """How each linear of a forward pass over `x` is quantized; None: not at all."""
        recipe, count = self.initialize(x.device), range(self.num_gemms)
        if not isinstance(recipe, DelayedScaling):
            return [recipe and Gemms(recipe) for _ in count]
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        live = [Slot(*pair) for pair in zip(forward.scale, forward.amax_history[0], strict=True)]
        grads = [Slot(*pair) for pair in zip(backward.scale, backward.amax_history[0], strict=True)]
        replayed = Now.checkpointed.scales(self, forward.scale) if Now.checkpointed else None
        slots = live if replayed is None else [Slot(scale) for scale in replayed]
        finish = None
        if replayed is not None:
            # A reentrant recomputation has a backward pass of its own; the other kind's is never run.
            finish = partial(update_scales, [self], "scaling_bwd")
        else:
            region = Now.region
            region.modules[self] = None
            learns = x.requires_grad or any(p.requires_grad for p in self.parameters())
            if torch.is_grad_enabled() and learns and region.take_first():
                finish = partial(update_scales, region.modules, "scaling_bwd")
        # With FSDP2, TE keeps no quantized weight: backward quantizes the gathered one by the new scales.
        return [
            Gemms(
                recipe,
                input=slots[3 * i],
                weight=slots[3 * i + 1],
                grad=grads[2 * i],
                requantize=live[3 * i + 1] if self.fsdp2 else None,
                finish=None if i else finish,
            )
            for i in count
        ]


@torch.no_grad()
def update_scales(modules: Iterable[Fp8Module], direction: Direction) -> None:
    """Move these modules' histories on and compute their scales; collective in a distributed run."""
    by_recipe: dict[DelayedScaling, list[DelayedState]] = {}
    for module in modules:
        by_recipe.setdefault(module.fp8_meta["recipe"], []).append(module.fp8_meta[direction])
    for recipe, states in by_recipe.items():
        widths = [len(state.scale) for state in states]
        history = torch.cat([state.amax_history for state in states], dim=1)
        amax = history[0].clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = torch.cat([state.scale for state in states])
        limit = torch.finfo(recipe.fp8_format.dtype("grad" if direction == "scaling_bwd" else "input")).max
        history, scale = next_scales(
            history, amax, scale, limit=limit * 2.0**-recipe.margin, algorithm=recipe.amax_compute_algo
        )
        parts = zip(states, history.split(widths, dim=1), scale.split(widths), strict=True)
        for state, new_history, new_scale in parts:
            state.amax_history.copy_(new_history)
            state.scale.copy_(new_scale)


def next_scales(
    history: Tensor, amax: Tensor, scale: Tensor, *, limit: float, algorithm: str
) -> tuple[Tensor, Tensor]:
    """Histories [steps, N] and scales [N] after a step with these amaxes [N]; `limit`: what an amax becomes.

    As in TE's kernel, row 0 collects, row 1 is the oldest and the last the latest. A tensor that was not seen
    (amax 0) keeps its history and scale, a scale that cannot be computed stays, and one beyond float32
    becomes its largest value.
    """
    rolled = history.roll(-1, 0)
    rolled[-1] = amax
    chosen = amax if algorithm == "most_recent" else rolled.amax(0)  # the row that drops out counts once more
    rolled[0] = 0.0
    seen = amax != 0
    usable = seen & chosen.isfinite() & (chosen > 0)
    new = (torch.full_like(chosen, limit) / chosen).clamp(max=FLOAT32_MAX)
    return torch.where(seen, rolled, history), torch.where(usable, new, scale)


class Pass(AbstractContextManager):
    """A pass over a checkpointed function: the first notes scales, its recomputations repeat them."""

    def __init__(self, notes: dict[Fp8Module, list[Tensor]], *, again: autocast | None = None):
        self.notes, self.again = notes, again

    def __enter__(self) -> Pass:
        if self.again:
            self.again.__enter__()
        self.outer, Now.checkpointed = Now.checkpointed, self
        self.calls: dict[Fp8Module, int] = {}
        return self

    def __exit__(self, *exception: Any) -> None:
        Now.checkpointed = self.outer
        if self.again:
            self.again.__exit__(*exception)

    def scales(self, module: Fp8Module, current: Tensor) -> Tensor | None:
        """The scales [N] of the first pass in a recomputation; None in the first pass."""
        if not self.again:
            self.notes.setdefault(module, []).append(current.clone())
            return None
        call = self.calls[module] = self.calls.get(module, -1) + 1
        return self.notes[module][call]


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """torch's checkpoint, which recomputes in FP8 with the scales of the first pass."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    notes: dict[Fp8Module, list[Tensor]] = {}
    first = Pass(notes)
    again = Pass(notes, again=autocast(enabled=Now.recipe is not None, recipe=Now.recipe))
    if not use_reentrant:
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (first, again), **kwargs
        )

    def run(*inputs: Any) -> Any:
        with again if torch.is_grad_enabled() else first:
            return function(*inputs, **kwargs)

    return torch_checkpoint(run, *args, use_reentrant=True)
