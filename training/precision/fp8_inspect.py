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
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UserError, bad_setting
from training.precision.fp8_counts import Cast, Tally
from training.precision.recipes import Precision

INSTALL = "pip install nvdlfw-inspect==0.2.2"
FEATURE = "CountCasts"  # name of the class in `feature`
TENSORS = ("activation", "gradient", "weight")
# TE decides by the step's number if a module is due. All watched steps share one number, since nvdlfw_inspect
# keeps every answer with its number forever. At a smaller number no module asks.
WATCHED, UNWATCHED = 0, -1


def read_cast(quantized: Any) -> Cast:
    """Read a tensor as TE stores it: with one scale, or in blocks whose scales are padded."""
    if hasattr(quantized, "_scale_inv"):
        return Cast(_as_fp8(quantized, quantized._data), quantized._scale_inv)
    data, scale_inv, block = quantized._rowwise_data, quantized._rowwise_scale_inv, (1, 32)
    if hasattr(quantized, "_fp4_dtype"):  # two values per byte, as numbers that are 0 where they are
        return Cast(torch.stack([data & 7, data >> 4 & 7], -1).flatten(-2).bfloat16(), None)
    if not hasattr(quantized, "_is_2D_scaled"):  # MXFP8: biased exponents
        scale_inv = torch.exp2(scale_inv.float() - 127)
    elif quantized._is_2D_scaled:
        block = (128, 128)
    else:
        scale_inv, block = scale_inv.t(), (1, 128)
    data = _as_fp8(quantized, data)
    rows, columns = (-(-size // each) for size, each in zip(data.shape, block, strict=True))
    return Cast(data, scale_inv[:rows, :columns], block)


def _as_fp8(quantized: Any, data: Tensor) -> Tensor:
    """View TE's bytes as [M, N] in their FP8 format."""
    formats = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
    return data.flatten(0, -2).view(formats[quantized._fp8_dtype.name])


def check_inspection(interval: int, *, fp8_attention: bool) -> None:
    """UserError if TE cannot be inspected."""
    if fp8_attention:
        reason = "TE's inspection does not see the FP8 tensors between attention and proj; drop one"
        raise bad_setting(reason, fp8_stats_interval=interval, fp8_attention=True)
    if find_spec("nvdlfw_inspect") is None:
        message = f"--fp8_stats_interval {interval}: nvdlfw_inspect is not installed; run: {INSTALL}"
        raise UserError(message, flags=("fp8_stats_interval",))


def inspection(precision: Precision) -> dict[str, Any]:
    """Return nvdlfw_inspect's configuration: it calls our feature with the casts of all modules in FP8."""
    names = [re.escape(name) for name, recipe in precision.by_module.items() if recipe != "bf16"]
    # A fused MLP's two GEMMs are fc1 and fc2.
    pattern = rf"^({'|'.join(names)})(\.fc[12])?$" if names else r"^layers\."
    layers = {"layer_name_regex_pattern": pattern}
    return {"fp8": {"enabled": True, "layers": layers, "transformer_engine": {FEATURE: {"enabled": True}}}}


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
            tally.add(layer_name, tensor_name, tensor, read_cast(rowwise_quantized_tensor))

    return CountCasts


@contextmanager
def inspect(precision: Precision, folder: Path, tally: Tally) -> Iterator[None]:
    """Inspect TE's modules, all built inside this context. Its own log goes to `folder`."""
    api, registry, logging = (
        importlib.import_module(f"nvdlfw_inspect.{name}") for name in ("api", "registry", "logging")
    )
    registry.Registry.register_feature("transformer_engine")(feature(tally, registry.api_method))
    package = find_spec("transformer_engine").submodule_search_locations[0]
    api.initialize(
        config_file=inspection(precision),
        feature_dirs=[str(Path(package) / "debug" / "features")],  # TE's API for features
        statistics_logger=logging.TensorboardLogger(None),  # writes nothing; the default writes files
        log_dir=str(folder),
        init_training_step=UNWATCHED,
    )
    yield
    api.end_debug()


@contextmanager
def watch_native(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Have TE show the casts of all modules to the feature, which adds them to its tally."""
    api = importlib.import_module("nvdlfw_inspect.api")
    api.initialize_training_step(WATCHED)
    yield
    api.initialize_training_step(UNWATCHED)
