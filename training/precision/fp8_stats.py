"""FP8 tensor statistics: what the casts of every --fp8_stats_interval'th step did to each GEMM's operands.

For each GEMM module's activation (its input), weight and gradient (of its output), as cast for the forward
pass and for the gradient of the input:

- underflow             share of the elements that are not zero and became zero
- overflow              share of the elements that exceeded the format's range and saturated
- amax                  largest magnitude
- scale_min, scale_max  factors applied before the cast; equal for recipes with one scale

Names are fp8/<module>/<tensor>/<statistic>. Micro-batches and ranks are added up. Recomputation casts an
activation twice, which changes no share. Steps that are not watched have no hooks; native TE layers then only
ask for a number.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from core.errors import bad_setting
from te_models.engine import Backend
from training.config import Config
from training.precision.fp8_counts import Stats, Tally
from training.precision.fp8_inspect import check_inspection, close_inspection, open_inspection, watch_native
from training.precision.precision_map import TE_GEMMS
from training.precision.recipes import Precision


@contextmanager
def watch_emulated(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Count the casts of emulated TE layers: their recipes become ones that also count."""

    def counting_gemms(name: str, gemms: Callable[[Tensor], list[Any]], x: Tensor) -> list[Any]:
        made = gemms(x)
        for number, gemm in enumerate(made, 1):
            if gemm is not None:
                own_name = name if len(made) == 1 else f"{name}.fc{number}"  # TE's names for an MLP's two
                gemm.recipe = CountingRecipe(gemm.recipe, functools.partial(tally.add, own_name))
        return made

    for name, module in modules.items():
        module.gemms = functools.partial(counting_gemms, name, module.gemms)
    yield
    for module in modules.values():
        del module.gemms


class CountingRecipe:
    """An emulated recipe that calls `count` with each tensor's rowwise cast, once per tensor."""

    TENSORS: ClassVar = {"input": "activation", "weight": "weight", "grad": "gradient"}

    def __init__(self, recipe: Any, count: Callable[..., None]) -> None:
        self._recipe, self._count = recipe, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def quantize(self, x: Tensor, kind: str, *rest: Any) -> Callable[[int], Any]:
        operand = self._recipe.quantize(x, kind, *rest)

        def cast(side: int) -> Any:
            made = operand(side)
            if side == 1:  # contracted by the forward pass, or by the gradient of the input
                self._count(self.TENSORS[kind], x, made.data, made.scale_inv, made.block)
            return made

        return cast


@contextmanager
def watch_torchao(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Count the casts of torchao's Float8Linear layers: hooks repeat those of inputs, weights and gradients.

    Weights that FSDP gathered in FP8 are left out: the originals are gone.
    """
    is_fp8 = importlib.import_module("torchao.float8.distributed_utils").tensor_already_casted_to_fp8

    def on_forward(name: str, layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        hidden, weight, settings = inputs[0], layer.weight, layer.config
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            # Emulated layers round weights too, see `torchao_fp8`.
            hidden, weight = hidden.to(dtype), weight.to(dtype) if settings.emulate else weight

        def count(tensor: str, original: Tensor, how: Any, dim: int) -> None:
            tally.add(name, tensor, *_repeat_cast(layer, tensor, original, how, dim))

        count("activation", hidden.flatten(0, -2), settings.cast_config_input, -1)  # [T, D]
        if not is_fp8(weight):
            count("weight", weight.t(), settings.cast_config_weight, 0)
        if output.requires_grad:
            how = settings.cast_config_grad_output
            output.register_hook(lambda grad: count("gradient", grad.flatten(0, -2), how, -1))

    hooks = [m.register_forward_hook(functools.partial(on_forward, name)) for name, m in modules.items()]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _repeat_cast(layer: Any, tensor: str, original: Tensor, how: Any, dim: int) -> tuple[Any, ...]:
    """Repeat a layer's cast of `original` [M, N] for the GEMM over `dim`; return what `cast_counts` reads."""
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    role = importlib.import_module("torchao.float8.float8_training_tensor").GemmInputRole
    roles = {"activation": role.INPUT, "weight": role.WEIGHT, "gradient": role.GRAD_OUTPUT}
    cast = scaling.hp_tensor_to_float8_dynamic(
        original,
        how.target_dtype,
        layer.linear_mm_config,
        gemm_input_role=roles[tensor],
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=scaling.get_maybe_axiswise_dim(dim, how.scaling_granularity),
        round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
    )
    data, scale_inv = cast._data, cast._scale.reciprocal()
    if dim == 0:
        original, data, scale_inv = original.t(), data.t(), scale_inv.t()
    return original, data, scale_inv, None if scale_inv.numel() == 1 else (1, data.shape[1])


def check(cfg: Config, precision: Precision, *, compiles: bool) -> None:
    """UserError, with the way out, if --fp8_stats_interval can have no statistics."""
    interval = cfg.log.fp8_stats_interval
    if not interval:
        return
    if not precision.fp8:
        reason = f"nothing is cast to FP8 in --mixed_precision {precision.effective}; use fp8, or drop it"
        raise bad_setting(reason, fp8_stats_interval=interval)
    if precision.te_backend is None and compiles:
        reason = "compiled layers do not show their casts; add --no_compile (slower), or drop it"
        raise bad_setting(reason, fp8_stats_interval=interval)
    if precision.te_backend == "native":
        check_inspection(interval, fp8_attention=cfg.precision.fp8_attention)


def _is_te_gemm(name: str, module: nn.Module) -> bool:
    return name.partition(".")[2].partition(".")[2] in TE_GEMMS  # after layers.N


# By backend: which modules to watch, and the context in which their casts are counted.
WATCHERS: dict[Backend | None, tuple[Callable[..., bool], Callable[..., AbstractContextManager]]] = {
    "native": (_is_te_gemm, watch_native),
    "emulated": (_is_te_gemm, watch_emulated),
    None: (lambda name, module: hasattr(module, "fp8_recipe"), watch_torchao),
}


class Fp8Stats:
    """Statistics of every `interval`'th step; does nothing with an interval of 0."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        """Prepare, before any TE module is built; `check` must have passed. TE's own log goes to `folder`."""
        self._interval = cfg.log.fp8_stats_interval
        self._tally, self._modules, self._watched = Tally(), {}, ExitStack()
        self._belongs, self._watch = WATCHERS[precision.te_backend]
        self._inspects_te = bool(self._interval) and precision.te_backend == "native"
        if self._inspects_te:
            open_inspection(precision, folder, self._tally)

    def attach(self, model: nn.Module) -> None:
        """Find the modules of the model that will run. Call once."""
        self._modules = {name: m for name, m in model.named_modules() if self._belongs(name, m)}
        for name, module in self._modules.items() if self._inspects_te else ():
            module.name = name  # TE shows casts with it

    def before_step(self, step: int) -> None:
        """Start watching if the step is due."""
        if self._interval and step % self._interval == 0:
            self._watched.enter_context(self._watch(self._modules, self._tally))

    def after_step(self, step: int, strategy: Any) -> Stats:
        """Return what to log of this step, if it was due. Collective."""
        self._watched.close()
        return self._tally.collect(strategy)

    def close(self) -> None:
        """Remove all hooks, and end TE's inspection."""
        self._watched.close()
        if self._inspects_te:
            close_inspection()
