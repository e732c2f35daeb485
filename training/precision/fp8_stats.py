"""FP8 tensor statistics of each GEMM's operands, in every --fp8_stats_interval'th step.

Statistics of a GEMM module's activation (input), weight and gradient (of the output), as cast for the forward
and dgrad GEMMs:

- underflow             share of elements that are nonzero and become zero
- overflow              share of elements that exceed the format's range and saturate
- amax                  largest magnitude
- scale_min, scale_max  smallest and largest scale; equal for recipes with one scale

Names are fp8/<module>/<tensor>/<statistic>. Counts are summed over micro-batches and ranks. Recomputation
casts an activation twice, which does not change the shares. Other steps have no hooks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.te_models.backend import Backend
from fp8_suite.te_models.emulation.casts import Quantized
from fp8_suite.te_models.lora.adapters import LayerNormMLP
from fp8_suite.training.config import Config
from fp8_suite.training.precision.fp8_counts import Stats, Tally
from fp8_suite.training.precision.fp8_inspect import INSTALL, inspecting, watch_native
from fp8_suite.training.precision.precision_map import TE_GEMMS
from fp8_suite.training.precision.recipes import Precision
from torch import Tensor, nn

MLP_GEMMS = ("layernorm_mlp.fc1", "layernorm_mlp.fc2")  # modules under LoRA, TE's names in a fused MLP
EMULATED_TENSORS = {"input": "activation", "weight": "weight", "grad": "gradient"}


@contextmanager
def watch_emulated(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Count the casts of emulated TE layers inside this context, by observing their GEMMs."""

    def observe(name: str, x: Tensor, kind: str, cast: Quantized) -> None:
        tally.add(name, EMULATED_TENSORS[kind], x, cast)

    def observed_gemms(name: str, module: nn.Module, gemms: Callable[[Tensor], list[Any]], x: Tensor) -> list:
        calls = gemms(x)
        for number, gemm in enumerate(calls if module.fp8 else (), 1):
            gemm_name = name if len(calls) == 1 else f"{name}.fc{number}"  # TE's names in a fused MLP
            gemm.observe = functools.partial(observe, gemm_name)
        return calls

    for name, module in modules.items():
        module.gemms = functools.partial(observed_gemms, name, module, module.gemms)
    yield
    for module in modules.values():
        del module.gemms


@contextmanager
def watch_torchao(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Count the casts of torchao's Float8Linear layers inside this context, by repeating them in hooks.

    Weights gathered in FP8 are skipped, because their original values are not available.
    """
    is_fp8 = importlib.import_module("torchao.float8.distributed_utils").tensor_already_casted_to_fp8

    def on_forward(name: str, layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        hidden, weight, settings = inputs[0], layer.weight, layer.config
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            # Emulated layers also round weights to BF16, see `torchao_fp8`.
            hidden, weight = hidden.to(dtype), weight.to(dtype) if settings.emulate else weight

        def count(tensor: str, original: Tensor, cast_config: Any) -> None:
            tally.add(name, tensor, original, _repeat_cast(layer, original, cast_config))

        count("activation", hidden.flatten(0, -2), settings.cast_config_input)  # [T, D]
        if not is_fp8(weight):
            count("weight", weight, settings.cast_config_weight)
        if output.requires_grad:
            cast_config = settings.cast_config_grad_output
            output.register_hook(lambda grad: count("gradient", grad.flatten(0, -2), cast_config))

    hooks = [m.register_forward_hook(functools.partial(on_forward, name)) for name, m in modules.items()]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _repeat_cast(layer: Any, original: Tensor, config: Any) -> Quantized:
    """Repeat a Float8Linear's cast of `original` [M, N], by its CastConfig, for the GEMM that contracts N."""
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    cast = scaling.hp_tensor_to_float8_dynamic(
        original,
        config.target_dtype,
        layer.linear_mm_config,
        scaling_granularity=config.scaling_granularity,
        axiswise_dim=scaling.get_maybe_axiswise_dim(-1, config.scaling_granularity),
        round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
    )
    scale_inv = cast._scale.reciprocal()
    return Quantized(cast._data, scale_inv, None if scale_inv.numel() == 1 else (1, original.shape[1]))


def check(cfg: Config, precision: Precision, *, compiles: bool) -> None:
    """UserError if --fp8_stats_interval cannot collect statistics in this run."""
    reason = None
    if not precision.fp8:
        reason = f"nothing is cast to FP8 in --mixed_precision {precision.effective}; use fp8, or drop it"
    elif precision.te_backend is None and compiles:
        reason = "casts of compiled layers cannot be observed; add --no_compile (slower), or drop it"
    elif precision.te_backend == "native" and find_spec("nvdlfw_inspect") is None:
        reason = f"nvdlfw_inspect is not installed; run {INSTALL}"
    if reason and cfg.log.fp8_stats_interval:
        raise bad_setting(reason, fp8_stats_interval=cfg.log.fp8_stats_interval)


WATCHERS: dict[Backend | None, Callable[..., AbstractContextManager]] = {
    "native": watch_native,
    "emulated": watch_emulated,
    None: watch_torchao,
}


class Fp8Stats:
    """Statistics of every `interval`'th step; does nothing with an interval of 0."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        """Set up. Call after `check` and before building TE modules. TE's log goes to `folder`."""
        self._interval, self._backend = cfg.log.fp8_stats_interval, precision.te_backend
        self._tally, self._modules = Tally(), {}
        self._inspection, self._watched = ExitStack(), ExitStack()
        if self._interval and self._backend == "native":
            self._inspection.enter_context(inspecting(precision, folder, self._tally))

    def attach(self, model: nn.Module) -> None:
        """Find the modules to watch. Call once."""
        for name, module in model.named_modules():
            gemm = name.partition(".")[2].partition(".")[2]  # after layers.N
            is_te_gemm = gemm in MLP_GEMMS or (gemm in TE_GEMMS and not isinstance(module, LayerNormMLP))
            if is_te_gemm if self._backend else hasattr(module, "fp8_recipe"):
                self._modules[name] = module
                if self._interval and self._backend == "native":
                    module.name = name  # TE passes it to the feature

    def before_step(self, step: int) -> None:
        """Start counting if the step is due."""
        if self._interval and step % self._interval == 0:
            self._watched.enter_context(WATCHERS[self._backend](self._modules, self._tally))

    def after_step(self, step: int, strategy: Any) -> Stats:
        """Return this step's statistics, or {} if it was not due. Collective."""
        self._watched.close()
        return self._tally.collect(strategy)

    def close(self) -> None:
        """Remove all hooks and end TE's inspection."""
        self._watched.close()
        self._inspection.close()
