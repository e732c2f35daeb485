"""FP8 tensor statistics: what the casts of every --fp8_stats_interval'th step did to each GEMM's operands.

Of each GEMM module's activation (its input), weight and gradient (of its output), as cast for the forward
pass and for the gradient of the input:

- underflow             share of the elements that are not zero and became zero
- overflow              share that was larger than the format holds and was cut off there
- amax                  largest magnitude
- scale_min, scale_max  what values were multiplied by before the cast; of recipes with one scale, the same

They are named fp8/<module>/<tensor>/<statistic>; `SOURCES` says where they come from. Micro-batches and
ranks are summed up; recomputation casts an activation twice alike, which changes no share. Other steps have
no hooks; native TE layers ask for a number then.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from te_models.engine import Backend
from training.config import Config
from training.precision.fp8_counts import Stats, Tally
from training.precision.fp8_inspect import InspectedTE, check_inspection
from training.precision.precision_map import TE_GEMMS
from training.precision.recipes import Precision


class Source(Protocol):
    """Where statistics come from; `start` and `finish` enclose a step that has them."""

    def attach(self, model: nn.Module) -> None: ...
    def start(self, step: int) -> None: ...
    def finish(self, strategy: Any) -> Stats: ...
    def close(self) -> None: ...


class EmulatedTE:
    """The casts of emulated TE layers: while a step is watched, their recipes are ones that count."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        self._tally, self._modules = Tally(), {}

    def attach(self, model: nn.Module) -> None:
        self._modules = {name: m for name, m in model.named_modules() if name.endswith(tuple(TE_GEMMS))}

    def start(self, step: int) -> None:
        for name, module in self._modules.items():
            module.gemms = functools.partial(self._counted, name, module.gemms)

    def _counted(self, name: str, gemms: Callable[[Tensor], list[Any]], x: Tensor) -> list[Any]:
        made = gemms(x)
        for number, gemm in enumerate(made, 1):
            if gemm is not None:
                own = name if len(made) == 1 else f"{name}.fc{number}"  # as TE calls an MLP's two
                gemm.recipe = CountingRecipe(gemm.recipe, functools.partial(self._tally.add, own))
        return made

    def finish(self, strategy: Any) -> Stats:
        self.close()
        return self._tally.take(strategy)

    def close(self) -> None:
        for module in self._modules.values():
            module.__dict__.pop("gemms", None)


class CountingRecipe:
    """An emulated recipe that tells `count` of each tensor's cast along its rows: of every tensor once."""

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


class TorchaoLayers:
    """torchao's Float8Linear layers: hooks repeat the casts of what goes in and of the gradient coming back.

    Weights that FSDP gathered in FP8 are left out: nothing is left to compare them with.
    """

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        self._tally, self._layers, self._hooks = Tally(), {}, []
        self._scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
        self._role = importlib.import_module("torchao.float8.float8_training_tensor").GemmInputRole
        self._is_cast = importlib.import_module(
            "torchao.float8.distributed_utils"
        ).tensor_already_casted_to_fp8

    def attach(self, model: nn.Module) -> None:
        self._layers = {n: m for n, m in model.named_modules() if hasattr(m, "fp8_recipe")}

    def start(self, step: int) -> None:
        for name, layer in self._layers.items():
            self._hooks.append(layer.register_forward_hook(functools.partial(self._on_forward, name)))

    def _on_forward(self, name: str, layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        hidden, weight, settings = inputs[0], layer.weight, layer.config
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            # Without a GPU weights are rounded too, see `torchao_fp8`.
            hidden, weight = hidden.to(dtype), weight.to(dtype) if settings.emulate else weight
        self._cast(name, "activation", hidden.flatten(0, -2), layer, settings.cast_config_input, -1)
        if not self._is_cast(weight):
            self._cast(name, "weight", weight.t(), layer, settings.cast_config_weight, 0)
        if output.requires_grad:
            cast = functools.partial(self._cast, name, "gradient")
            output.register_hook(
                lambda grad: cast(grad.flatten(0, -2), layer, settings.cast_config_grad_output, -1)
            )

    @torch.no_grad()
    def _cast(self, name: str, tensor: str, original: Tensor, layer: Any, how: Any, dim: int) -> None:
        """Cast `original` [M, N] as the layer does for the GEMM that contracts `dim`."""
        roles = {"activation": self._role.INPUT, "weight": self._role.WEIGHT}
        cast = self._scaling.hp_tensor_to_float8_dynamic(
            original,
            how.target_dtype,
            layer.linear_mm_config,
            gemm_input_role=roles.get(tensor, self._role.GRAD_OUTPUT),
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=self._scaling.get_maybe_axiswise_dim(dim, how.scaling_granularity),
            round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
        )
        data, scale_inv = cast._data, cast._scale.reciprocal()
        if dim == 0:
            original, data, scale_inv = original.t(), data.t(), scale_inv.t()
        block = None if scale_inv.numel() == 1 else (1, data.shape[1])
        self._tally.add(name, tensor, original, data, scale_inv, block)

    def finish(self, strategy: Any) -> Stats:
        self.close()
        return self._tally.take(strategy)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


SOURCES: dict[Backend | None, Callable[[Config, Precision, Path], Source]] = {
    "native": InspectedTE,
    "emulated": EmulatedTE,
    None: TorchaoLayers,
}


def check(cfg: Config, precision: Precision, *, compiles: bool) -> None:
    """ValueError or RuntimeError, with the way out, where --fp8_stats_interval can have no statistics."""
    flag = f"--fp8_stats_interval {cfg.log.fp8_stats_interval}"
    if not cfg.log.fp8_stats_interval:
        return
    if not precision.fp8:
        raise ValueError(
            f"{flag}: nothing is cast to FP8 in --mixed_precision {precision.effective}; use fp8, or drop it"
        )
    if precision.te_backend is None and compiles:
        raise ValueError(
            f"{flag}: compiled layers do not show their casts; add --no_compile (slower), or drop it"
        )
    if precision.te_backend == "native":
        check_inspection(flag, fp8_attention=cfg.precision.fp8_attention)


class Fp8Stats:
    """The statistics of every `interval`'th step, from wherever this run's casts can be seen."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        """Before any TE module is built; `check` must have passed. TE's own log goes to `folder`."""
        self._interval = cfg.log.fp8_stats_interval
        self._source: Source | None = None
        if self._interval:
            self._source = SOURCES[precision.te_backend](cfg, precision, folder)

    def attach(self, model: nn.Module) -> None:
        """Once, with the model that will run."""
        if self._source:
            self._source.attach(model)

    def before_step(self, step: int) -> None:
        if self._source and step % self._interval == 0:
            self._source.start(step)

    def after_step(self, step: int, strategy: Any) -> Stats:
        """What is to be logged of this step, if anything; collective."""
        if self._source and step % self._interval == 0:
            return self._source.finish(strategy)
        return {}

    def close(self) -> None:
        if self._source:
            self._source.close()
