"""FP8 tensor statistics of native TE layers: TE shows each cast of a watched step, and we count it.

TE calls a registered feature of its inspection (nvdlfw_inspect) with every tensor before and after the cast.
TE's own features are not used. They wait for the GPU hundreds of times per tensor, and with two at once every
tensor is printed into a message that nobody reads: a watched step took 30 times as long as another. In steps
that are not watched a module only asks for the step's number.

https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/debug.html
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.errors import UserError, bad_setting
from core.recipes import RECIPES
from training.precision.fp8_counts import Tally
from training.precision.recipes import Precision

INSTALL = "pip install nvdlfw-inspect==0.2.2"
MODULES = ("api", "registry", "logging")
FEATURE = "CountCasts"  # name of the class in `feature`
TENSORS = ("activation", "gradient", "weight")
# TE decides by the step's number if a module is due. All watched steps share one number, since nvdlfw_inspect
# keeps every answer with its number forever. At a smaller number no module asks.
WATCHED, UNWATCHED = 0, -1


class Cast(NamedTuple):
    """FP8 data for the GEMM that contracts rows, as `cast_counts` reads it."""

    data: Tensor  # [M, N] FP8
    scale_inv: Tensor | None  # float32, [M/m, N/n] (rounded up) or one number; None: not known
    block: tuple[int, int] | None = None  # (m, n)


def _read_tensor(quantized: Any) -> Cast:
    """Read a tensor with one scale."""
    return Cast(_as_fp8(quantized, quantized._data), quantized._scale_inv)


def _read_blocks(quantized: Any) -> Cast:
    """Read blocks of 128 x 128, or of 1 x 128 with transposed scales; scales are padded to multiples of 4."""
    block = (128, 128) if quantized._is_2D_scaled else (1, 128)
    scale_inv = quantized._rowwise_scale_inv
    scale_inv = scale_inv if quantized._is_2D_scaled else scale_inv.t()
    return _without_padding(_as_fp8(quantized, quantized._rowwise_data), scale_inv, block)


def _read_mx_blocks(quantized: Any) -> Cast:
    """Read blocks of 1 x 32 with biased exponents in bytes as scales, padded to 128 x 4."""
    scale_inv = torch.exp2(quantized._rowwise_scale_inv.float() - 127)
    return _without_padding(_as_fp8(quantized, quantized._rowwise_data), scale_inv, (1, 32))


def _read_fp4_blocks(quantized: Any) -> Cast:
    """Read two FP4 values per byte as numbers that are 0 where they are; two-level scales stay unknown."""
    packed = quantized._rowwise_data  # uint8 [M, N/2]
    return Cast(torch.stack([packed & 7, packed >> 4 & 7], -1).flatten(-2).bfloat16(), None)


def _as_fp8(quantized: Any, data: Tensor) -> Tensor:
    """View TE's bytes as [M, N] in their FP8 format."""
    formats = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
    return data.flatten(0, -2).view(formats[quantized._fp8_dtype.name])


def _without_padding(data: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Cast:
    rows, columns = (-(-size // each) for size, each in zip(data.shape, block, strict=True))
    return Cast(data, scale_inv[:rows, :columns], block)


READERS: dict[str, Callable[[Any], Cast]] = {  # by `RecipeSpec.storage`
    "tensor": _read_tensor,
    "blocks": _read_blocks,
    "mx_blocks": _read_mx_blocks,
    "fp4_blocks": _read_fp4_blocks,
}


def check_inspection(interval: int, *, fp8_attention: bool) -> None:
    """UserError if TE cannot be inspected."""
    if fp8_attention:
        reason = "TE's inspection does not see the FP8 tensors between attention and proj; drop one"
        raise bad_setting(reason, fp8_stats_interval=interval, fp8_attention=True)
    if find_spec("nvdlfw_inspect") is None:
        message = f"--fp8_stats_interval {interval}: nvdlfw_inspect is not installed; run: {INSTALL}"
        raise UserError(message, flags=("fp8_stats_interval",))


def inspection(precision: Precision) -> dict[str, Any]:
    """Return nvdlfw_inspect's configuration: it calls our feature with each module's recipe."""
    patterns = {} if precision.by_module else {precision.effective: r"^layers\."}
    for recipe in sorted(precision.in_use) if precision.by_module else ():
        modules = [re.escape(name) for name, own in precision.by_module.items() if own == recipe]
        patterns[recipe] = rf"^({'|'.join(modules)})(\.fc[12])?$"  # a fused MLP's two GEMMs: fc1, fc2
    return {
        recipe: {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {FEATURE: {"enabled": True, "recipe": recipe}},
        }
        for recipe, pattern in patterns.items()
    }


def feature(tally: Tally, api_method: Callable[[Any], Any]) -> type:
    """Return the class that nvdlfw_inspect instantiates; `api_method` marks what TE may call.

    A single feature: with two, nvdlfw_inspect would print the tensors into messages.
    """

    class CountCasts:
        def parse_config_and_api(self, config: dict, **call: Any) -> tuple[bool, dict]:
            """Return if a call is for this feature, and the configuration that it gets."""
            return call["tensor_name"] in TENSORS, config

        @api_method
        def inspect_tensor_enabled(self, config: dict, layer_name: str, **_: Any) -> tuple[bool, int]:
            """Return if to inspect now, and the next step to ask at. TE asks in watched steps only."""
            return True, WATCHED

        @api_method
        def inspect_tensor(
            self,
            config: dict,
            layer_name: str,
            tensor_name: str,
            tensor: Tensor | None,
            rowwise_quantized_tensor: Any,
            **_: Any,
        ) -> None:
            """Count a cast of `tensor`, which is None for weights that are kept in FP8."""
            read = READERS[RECIPES[config["recipe"]].storage]
            tally.add(layer_name, tensor_name, tensor, *read(rowwise_quantized_tensor))

    return CountCasts


def open_inspection(precision: Precision, folder: Path, tally: Tally) -> None:
    """Initialize TE's inspection, before any TE module is built. Its own log goes to `folder`."""
    api, registry, logging = (importlib.import_module(f"nvdlfw_inspect.{name}") for name in MODULES)
    registry.Registry.register_feature("transformer_engine")(feature(tally, registry.api_method))
    package = find_spec("transformer_engine").submodule_search_locations[0]
    api.initialize(
        config_file=inspection(precision),
        feature_dirs=[str(Path(package) / "debug" / "features")],  # TE's API for features
        statistics_logger=logging.TensorboardLogger(None),  # writes nothing; the default writes files
        log_dir=str(folder),
        init_training_step=UNWATCHED,
    )


def close_inspection() -> None:
    """End TE's inspection."""
    importlib.import_module("nvdlfw_inspect.api").end_debug()


@contextmanager
def watch_native(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Have TE show the casts of all modules to the feature, which adds them to its tally."""
    api = importlib.import_module("nvdlfw_inspect.api")
    api.initialize_training_step(WATCHED)
    yield
    api.initialize_training_step(UNWATCHED)
