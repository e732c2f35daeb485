"""FP8 tensor statistics of native TE layers: TE shows each cast of a watched step, and we count it.

TE sees the casts inside its modules, and what is registered as a feature of its inspection (nvdlfw_inspect)
is called with every tensor before and after. TE's own features are not used: they wait for the GPU hundreds
of times a tensor, and two at once have every tensor printed into a message that nobody reads, which made a
watched step take 30 times as long as another. Between watched steps no module does more than ask for the
step's number.

https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/debug.html
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.config import Config
from training.precision.fp8_counts import Stats, Tally
from training.precision.precision_map import TE_GEMMS
from training.precision.recipes import Precision

INSTALL = "pip install nvdlfw-inspect==0.2.2"
FEATURE = "CountCasts"  # as the class of `feature` is called
TENSORS = ("activation", "gradient", "weight")
# Whether a module is due TE decides by the step's number. All watched steps share one, since nvdlfw_inspect
# keeps every answer with its number forever; at a smaller one no module asks it anything.
WATCHED, UNWATCHED = 0, -1


class Cast(NamedTuple):
    """What `cast_counts` is to know of a cast for the GEMM that contracts rows."""

    data: Tensor  # [M, N] FP8
    scale_inv: Tensor | None  # float32, [M/m, N/n] (rounded up) or one number; None: not known
    block: tuple[int, int] | None = None  # (m, n)


def _of_one_scale(found: Any) -> Cast:
    return Cast(_fp8(found, found._data), found._scale_inv)


def _of_blocks(found: Any) -> Cast:
    """Blocks of 128 x 128, or of 1 x 128 whose scales are the other way round; both are padded to 4."""
    block = (128, 128) if found._is_2D_scaled else (1, 128)
    scale_inv = found._rowwise_scale_inv if found._is_2D_scaled else found._rowwise_scale_inv.t()
    return _without_padding(_fp8(found, found._rowwise_data), scale_inv, block)


def _of_mx_blocks(found: Any) -> Cast:
    """Blocks of 1 x 32, whose scales are biased exponents in bytes, padded to 128 x 4."""
    scale_inv = torch.exp2(found._rowwise_scale_inv.float() - 127)
    return _without_padding(_fp8(found, found._rowwise_data), scale_inv, (1, 32))


def _of_nv_blocks(found: Any) -> Cast:
    """Two FP4 values a byte, as numbers that are 0 where they are; scales of two levels stay unknown."""
    packed = found._rowwise_data  # uint8 [M, N/2]
    return Cast(torch.stack([packed & 7, packed >> 4 & 7], -1).flatten(-2).bfloat16(), None)


def _fp8(found: Any, data: Tensor) -> Tensor:
    """TE keeps FP8 as bytes, and the format beside them."""
    formats = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
    return data.flatten(0, -2).view(formats[found._fp8_dtype.name])


def _without_padding(data: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Cast:
    rows, columns = (-(-size // each) for size, each in zip(data.shape, block, strict=True))
    return Cast(data, scale_inv[:rows, :columns], block)


READERS: dict[str, Callable[[Any], Cast]] = {
    "delayed": _of_one_scale,
    "current": _of_one_scale,
    "block": _of_blocks,
    "mxfp8": _of_mx_blocks,
    "nvfp4": _of_nv_blocks,
}


def check_inspection(flag: str, *, fp8_attention: bool) -> None:
    """ValueError or RuntimeError where TE cannot be inspected."""
    if fp8_attention:
        raise ValueError(
            f"{flag} --fp8_attention: TE's inspection has no FP8 tensors between attention and proj; drop one"
        )
    if find_spec("nvdlfw_inspect") is None:
        raise RuntimeError(f"{flag}: nvdlfw_inspect is not installed; run: {INSTALL}")


def layers_of(precision: Precision) -> dict[str, str]:
    """Recipe -> a regular expression for the names of the modules that run in it."""
    if not precision.by_module:
        return {precision.effective: r"^layers\."}
    patterns = {}
    for recipe in sorted(precision.in_use):
        modules = [re.escape(name) for name, ran in precision.by_module.items() if ran == recipe]
        patterns[recipe] = rf"^({'|'.join(modules)})(\.fc[12])?$"  # a fused MLP's two GEMMs: fc1, fc2
    return patterns


def inspection(layers: dict[str, str]) -> dict[str, Any]:
    """What nvdlfw_inspect is to do: call our feature, and tell it each module's recipe."""
    return {
        recipe: {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {FEATURE: {"enabled": True, "recipe": recipe}},
        }
        for recipe, pattern in layers.items()
    }


def feature(tally: Tally, api_method: Callable[[Any], Any]) -> type:
    """The class that nvdlfw_inspect makes an object of; `api_method` marks what TE may call.

    One feature alone: of two, nvdlfw_inspect would print the tensors into messages.
    """

    class CountCasts:
        def parse_config_and_api(self, config: dict, **call: Any) -> tuple[bool, dict]:
            """Whether a call is for us, and the configuration that it gets."""
            return call["tensor_name"] in TENSORS, config

        @api_method
        def inspect_tensor_enabled(self, config: dict, layer_name: str, **_: Any) -> tuple[bool, int]:
            """TE asks in watched steps alone; the answer is for now, and when to ask again."""
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
            """A cast of `tensor`, which is None of weights that are kept in FP8."""
            cast = READERS[config["recipe"]](rowwise_quantized_tensor)
            tally.add(layer_name, tensor_name, tensor, *cast)

    return CountCasts


class InspectedTE:
    """The casts of native layers, which TE shows while a step is watched."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        self._api = importlib.import_module("nvdlfw_inspect.api")
        registry = importlib.import_module("nvdlfw_inspect.registry")
        logging = importlib.import_module("nvdlfw_inspect.logging")
        self._tally = Tally()
        registry.Registry.register_feature("transformer_engine")(feature(self._tally, registry.api_method))
        package = find_spec("transformer_engine").submodule_search_locations[0]
        self._api.initialize(
            config_file=inspection(layers_of(precision)),
            feature_dirs=[str(Path(package) / "debug" / "features")],  # with the API that features are for
            statistics_logger=logging.TensorboardLogger(None),  # writes nothing; without one, to files
            log_dir=str(folder),
            init_training_step=UNWATCHED,
        )

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.partition(".")[2].partition(".")[2] in TE_GEMMS:
                module.name = name

    def start(self, step: int) -> None:
        self._api.initialize_training_step(WATCHED)

    def finish(self, strategy: Any) -> Stats:
        self._api.initialize_training_step(UNWATCHED)
        return self._tally.take(strategy)

    def close(self) -> None:
        self._api.end_debug()
