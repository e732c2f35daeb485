"""FP8 tensor statistics of native TE layers, through TE's inspection (nvdlfw_inspect).

TE calls a registered nvdlfw_inspect feature with every tensor before and after its cast. TE's own features
are not used: they synchronize with the GPU hundreds of times per tensor, which made an inspected step 30x
slower. In other steps a module only reads the step number.

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
from fp8_suite.te_models.emulation.casts import Quantized
from fp8_suite.training.precision.fp8_counts import Tally
from fp8_suite.training.precision.recipes import Precision
from torch import Tensor, nn

INSTALL = "pip install nvdlfw-inspect==0.2.2"
FEATURE = "CountCasts"  # name of the class in `count_feature`
TENSORS = ("activation", "gradient", "weight")
# TE decides by the step number whether to inspect. All watched steps use the same number, because
# nvdlfw_inspect caches its results per step number forever. Lower numbers disable inspection.
WATCHED, UNWATCHED = 0, -1


def read_cast(quantized: Any) -> Quantized:
    """Read the [M, N] form that the forward or dgrad GEMM reads of a quantized TE tensor [..., N].

    Block scales lose TE's padding. The scales of NVFP4 are not read (`scale_inv` None).
    """
    if hasattr(quantized, "_scale_inv"):
        return Quantized(_as_fp8(quantized, quantized._data), quantized._scale_inv)
    data, scale_inv, block = quantized._rowwise_data, quantized._rowwise_scale_inv, (1, 32)
    if hasattr(quantized, "_fp4_dtype"):  # two values per byte; only zero or nonzero matters
        data = data.flatten(0, -2)
        return Quantized(torch.stack([data & 7, data >> 4 & 7], -1).flatten(1).bfloat16())
    if not hasattr(quantized, "_is_2D_scaled"):  # MXFP8: biased exponents
        scale_inv = torch.exp2(scale_inv.float() - 127)
    elif quantized._is_2D_scaled:
        block = (128, 128)
    else:
        scale_inv, block = scale_inv.t(), (1, 128)
    data = _as_fp8(quantized, data)
    rows, columns = (-(-size // edge) for size, edge in zip(data.shape, block, strict=True))
    return Quantized(data, scale_inv[:rows, :columns], block)


def _as_fp8(quantized: Any, data: Tensor) -> Tensor:
    """View TE's uint8 data as FP8 [M, N]."""
    formats = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
    return data.flatten(0, -2).view(formats[quantized._fp8_dtype.name])


def inspect_config(precision: Precision) -> dict[str, Any]:
    """Return the nvdlfw_inspect configuration that enables our feature for all FP8 modules."""
    names = [re.escape(name) for name, recipe in precision.by_module.items() if recipe != "bf16"]
    # A fused MLP's two GEMMs are fc1 and fc2.
    pattern = rf"^({'|'.join(names)})(\.fc[12])?$" if names else r"^layers\."
    layers = {"layer_name_regex_pattern": pattern}
    return {"fp8": {"enabled": True, "layers": layers, "transformer_engine": {FEATURE: {"enabled": True}}}}


def count_feature(tally: Tally, api_method: Callable[[Any], Any]) -> type:
    """Return the class that nvdlfw_inspect instantiates; `api_method` marks the methods that TE calls.

    Register one feature only: with two, nvdlfw_inspect formats every tensor into a message.
    """

    class CountCasts:
        def parse_config_and_api(self, config: dict, **call: Any) -> tuple[bool, dict]:
            """Return (True if this feature handles the call, configuration to pass)."""
            return call["tensor_name"] in TENSORS, config

        @api_method
        def inspect_tensor_enabled(self, config: dict, layer_name: str, **_: Any) -> tuple[bool, int]:
            """Return (inspect now, next step to inspect). TE calls this in watched steps only."""
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
            """Count a cast of `tensor` (None for weights stored in FP8)."""
            tally.add(layer_name, tensor_name, tensor, read_cast(rowwise_quantized_tensor))

    return CountCasts


@contextmanager
def inspecting(precision: Precision, folder: Path, tally: Tally) -> Iterator[None]:
    """Enable inspection of TE modules built inside this context. TE's log goes to `folder`."""
    api, registry, logging = (
        importlib.import_module(f"nvdlfw_inspect.{name}") for name in ("api", "registry", "logging")
    )
    registry.Registry.register_feature("transformer_engine")(count_feature(tally, registry.api_method))
    package = find_spec("transformer_engine").submodule_search_locations[0]
    api.initialize(
        config_file=inspect_config(precision),
        feature_dirs=[str(Path(package) / "debug" / "features")],  # TE's API for features
        statistics_logger=logging.TensorboardLogger(None),  # writes nothing; the default writes files
        log_dir=str(folder),
        init_training_step=UNWATCHED,
    )
    yield
    api.end_debug()


@contextmanager
def watch_native(modules: dict[str, nn.Module], tally: Tally) -> Iterator[None]:
    """Count the casts of native TE layers inside this context."""
    api = importlib.import_module("nvdlfw_inspect.api")
    api.initialize_training_step(WATCHED)
    yield
    api.initialize_training_step(UNWATCHED)
