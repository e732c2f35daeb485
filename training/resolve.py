"""Resolve the precision and model of a run and check that they are compatible, before loading weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.readers import read_record
from fp8_suite.core.recipes import FALLBACK_RECIPE, TORCHAO_RECIPES
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.settings import recompute_levels
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.sources import weight_files
from fp8_suite.te_models.spec import ModelSpec, digests, find_model
from fp8_suite.training.config import Config, read_settings
from fp8_suite.training.estimate import sizes
from fp8_suite.training.estimate.choose import choose_layout, free_memory
from fp8_suite.training.export.loss import require_fp8_export
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.settings import AXES
from fp8_suite.training.precision import checks, precision_map, recipes, torchao_fp8
from fp8_suite.training.precision.recipes import Precision


@dataclass(frozen=True)
class Resolved:
    """Precision and model of a run."""

    precision: Precision
    model: ModelSpec
    shape: ModelShape | None  # None for an unknown architecture
    flops_shape: ModelShape | None  # `shape`, or None if the run's FLOPs cannot be counted
    digests: dict[str, str]  # of the model's files, compared across ranks and with a checkpoint's
    cp_comm_type: str | None = None  # that runs; None without context parallelism

    @property
    def model_files(self) -> dict[str, str] | None:
        """Digests by which a model is known wherever its folder is; None without safetensors."""
        return self.digests if self.model.weights and weight_files(self.model.weights) else None


def resolve_layout(cfg: Config, device: torch.device) -> Config:
    """Return the settings with numbers in place of `auto` for parallel sizes. Collective.

    A resumed run keeps its layout on the same number of ranks. UserError if no layout fits.
    """
    if not sizes.auto_sizes(cfg):
        return cfg
    if saved := ranks.run_on_rank0(lambda: _saved_layout(cfg)):
        print_rank0(f"layout: as in {cfg.checkpoint.output_dir}")
        return replace(cfg, sharding=replace(cfg.sharding, **saved))
    if ranks.world_size() == 1 or device.type != "cuda" or cfg.optim.max_steps == 0:
        print_rank0("layout: sizes of auto are 1, as this run does not train on several GPUs")
        return sizes.without_auto_sizes(cfg)
    free = min(ranks.run_on_all_ranks(lambda: free_memory(cfg, device)))
    return ranks.run_on_rank0(lambda: _search_layout(cfg, device, free))


def _saved_layout(cfg: Config) -> dict[str, Any]:
    """Return the layout of the run to resume, in place of `auto`; {} if there is none for these ranks."""
    folder = Path(cfg.checkpoint.output_dir or "")
    saved = Config().to_dict() | read_settings(folder)
    same = all(getattr(cfg.sharding, name) in (AUTO, saved[name]) for name in AXES.values())
    if not same or read_record(folder / "env.json").get("world_size") != ranks.world_size():
        return {}
    return {name: saved[name] for name in sizes.searched_settings(cfg)}


def _search_layout(cfg: Config, device: torch.device, free: int) -> Config:
    precision, spec = recipes.resolve_precision(cfg), _find_model(cfg)
    shape, per_node = ModelShape.from_hf_config(spec.config), ranks.local_rank_and_size()[1]
    check = partial(checks.check_part, shape=shape, gpus_per_node=per_node, precision=precision)
    return choose_layout(cfg, spec, device, precision.effective, free, check)


def resolve(cfg: Config) -> Resolved:
    """Resolve recipe and model; warn about fallbacks and unused settings.

    UserError if the recipe cannot run here or settings are incompatible.
    """
    precision = recipes.resolve_precision(cfg)
    torchao_fp8.silence_import()  # transformers imports torchao wherever it is installed
    if precision.effective in TORCHAO_RECIPES:
        torchao_fp8.require_torchao()
    spec = _find_model(cfg)
    precision = precision_map.resolve_map(cfg, precision, spec.config.get_text_config())
    if spec.dequantized:
        dithers = bool(spec.on_one_grid) and _casts_weights_again(cfg, precision)
        dithered = ", dithered" if dithers else ""
        print_rank0(f"dequantizes {spec.dequantized} of {spec.name}{dithered}")
        spec = replace(spec, dithers=dithers, dequantized=spec.dequantized + dithered)
    if reason := precision.fallback_reason:
        rule = "!" * 100
        print_rank0(f"{rule}\nWARNING: {reason}\nRUNNING INSTEAD: {FALLBACK_RECIPE} scaling\n{rule}")
    shape = ModelShape.from_hf_config(spec.config)
    communication = _check(cfg, precision, spec, shape)
    if warning := checks.unused_fp8_flags(cfg, precision):
        print_rank0(f"WARNING: {warning}")
    if cfg.precision.master_weights == "none":
        print_rank0(optim.MASTER_NONE_WARNING)
    return Resolved(precision, spec, shape, _flops_shape(cfg, spec, shape), digests(spec), communication)


def _casts_weights_again(cfg: Config, precision: Precision) -> bool:
    """True if training casts the weights to FP8.

    The step from a weight of an FP8 checkpoint to where it would round elsewhere is the same all over a grid,
    up to half a step. A smaller update would change no forward pass.
    """
    return precision.fp8 and cfg.optim.max_steps != 0 and not cfg.lora.lora_rank


def _find_model(cfg: Config) -> ModelSpec:
    return find_model(
        cfg.model.model_name,
        init=cfg.model.init,
        use_te=cfg.model.use_te,
        trust_remote_code=cfg.model.trust_remote_code,
        max_seq_length=cfg.data.max_seq_length,
    )


def _flops_shape(cfg: Config, spec: ModelSpec, shape: ModelShape | None) -> ModelShape | None:
    """Return the shape for counting FLOPs. If they cannot be counted, print why and return None."""
    length = cfg.data.max_seq_length
    if shape is None:
        reason = f"the FLOPs of model type {spec.family} are not known"
    elif not shape.sees_all(length):
        reason = f"sliding-window attention ({shape.window}) is shorter than --max_seq_length {length}"
    else:
        return shape
    print_rank0(f"TFLOP/s and MFU are not reported: {reason}")
    return None


def _check(cfg: Config, precision: Precision, spec: ModelSpec, shape: ModelShape | None) -> str | None:
    """UserError if the model cannot run in this precision. Return how the ranks of a sequence attend."""
    communication = None
    if shape is not None and cfg.model.recompute != AUTO:
        recompute_levels(cfg.model.recompute, shape.num_layers)
    if shape is not None and cfg.model.use_te:
        cfg.sharding.data_ranks(ranks.world_size())
        gpus_per_node = ranks.local_rank_and_size()[1]
        communication = checks.check_part(cfg, shape=shape, gpus_per_node=gpus_per_node, precision=precision)
    elif cfg.precision.fp8_lm_head:
        text = spec.config.get_text_config()
        checks.check_lm_head(cfg, text.hidden_size, text.vocab_size, one_gemm=spec.is_known_family)
    checks.check_settings(cfg, precision)
    if "fp8" in cfg.export_folders:
        require_fp8_export(spec)
    return communication
