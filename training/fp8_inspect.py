"""FP8 tensor statistics of native TE layers, taken by TE's own inspection (nvdlfw_inspect).

TE sees the casts inside its modules; all that is done here is to tell it which statistics of which modules to
take at which steps, and to pass its numbers on. A module without statistics in a step runs as fast as ever.
Overflow is told of delayed scaling alone: the other recipes scale by the largest value, so nothing overflows.
Scales are told of recipes with one a tensor.

https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/debug.html
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from training.config import Config
from training.precision import Precision
from training.precision_map import TE_GEMMS

INSTALL = "pip install nvdlfw-inspect==0.2.2"
# TE counts training steps; at step 0 it takes no statistics, so this is where it stays in between.
NO_STEP = 0

SCALES = ["scale_inv_min", "scale_inv_max"]
# Recipe -> (TE's feature, its statistics); "weight" has those that need no weight in higher precision.
FEATURES = {
    "delayed": ("LogFp8TensorStats", ["underflows%", "overflows%", *SCALES]),
    "current": ("LogFp8TensorStats", ["underflows%", *SCALES]),
    # TE pads the tensors that hold a scale per block, and its scale statistics count the padding too.
    "block": ("LogFp8TensorStats", ["underflows%"]),
    "mxfp8": ("LogFp8TensorStats", ["underflows%"]),
    "nvfp4": ("LogNvfp4TensorStats", ["underflows%"]),
}
# TE's name -> (ours, how its value becomes ours); TE counts in percent and knows the inverse of a scale.
NAMES: dict[str, tuple[str, Callable[[float], float]]] = {
    "underflows%": ("underflow", lambda value: value / 100),
    "overflows%": ("overflow", lambda value: value / 100),
    "cur_amax": ("amax", float),
    "scale_inv_max": ("scale_min", lambda value: 1 / value if value else float("inf")),
    "scale_inv_min": ("scale_max", lambda value: 1 / value if value else float("inf")),
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


def inspection(layers: dict[str, str], interval: int, *, fp8_weights: bool) -> dict[str, Any]:
    """What nvdlfw_inspect is to do: each recipe's statistics, every `interval` steps from 1 on.

    With `fp8_weights` there is no weight in higher precision to compare with.
    """
    steps = {"freq": interval, "start_step": NO_STEP + 1}
    tasks = {}
    for recipe, pattern in layers.items():
        feature, stats = FEATURES[recipe]
        of_weights = [stat for stat in stats if stat in SCALES] if fp8_weights else stats
        tensors = {"activation": stats, "gradient": stats, "weight": of_weights}
        cast = [{"tensor": name, "stats": own, **steps} for name, own in tensors.items()]
        amax = {"tensors": list(tensors), "stats": ["cur_amax"], **steps}
        tasks[recipe] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {
                feature: {"enabled": True, "tensors_struct": cast},
                "LogTensorStats": {"enabled": True, **amax},
            },
        }
    return tasks


def renamed(values: dict[str, Any]) -> dict[str, float]:
    """TE's names and numbers, <module>_<tensor>_<statistic>, as ours."""
    found = {}
    for name, value in values.items():
        module, tensor, stat = re.fullmatch(r"(.+)_(activation|gradient|weight)_(.+)", name).groups()
        ours, convert = NAMES[stat.removeprefix("nvfp4_")]
        found[f"fp8/{module}/{tensor}/{ours}"] = convert(float(value))
    return found


class InspectedTE:
    """TE's inspection of native layers; TE gathers the numbers of all ranks itself."""

    def __init__(self, cfg: Config, precision: Precision, folder: Path) -> None:
        self._api = importlib.import_module("nvdlfw_inspect.api")
        logger = importlib.import_module("nvdlfw_inspect.logging").BaseLogger
        values = self._values = {}

        class Collector(logger):
            def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
                values[name] = value

        package = find_spec("transformer_engine").submodule_search_locations[0]
        fp8_weights = cfg.sharding.fp8_all_gather
        self._api.initialize(
            config_file=inspection(layers_of(precision), cfg.log.fp8_stats_interval, fp8_weights=fp8_weights),
            feature_dirs=[str(Path(package) / "debug" / "features")],
            statistics_logger=Collector(),
            log_dir=str(folder),
            init_training_step=NO_STEP,
        )

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.partition(".")[2].partition(".")[2] in TE_GEMMS:
                module.name = name

    def start(self, step: int) -> None:
        self._api.initialize_training_step(step)

    def finish(self, strategy: Any) -> dict[str, float]:
        self._api.step()
        self._api.initialize_training_step(NO_STEP)
        found = renamed(self._values)
        self._values.clear()
        return found

    def close(self) -> None:
        self._api.end_debug()
