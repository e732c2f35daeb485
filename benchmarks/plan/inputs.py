"""Inputs of a plan: model dimensions, and the setup that training would choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.families import FAMILIES, Family
from fp8_suite.te_models.presets import PRESETS, closest_preset
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import Layout, check_layout
from fp8_suite.training.estimate.modes import make_setup
from fp8_suite.training.estimate.setup import ModelSize, rank_setups
from fp8_suite.training.estimate.sizes import Sizing, check_number_of_ranks, choose_sizes, why_unpredicted
from fp8_suite.training.parallel.settings import MODES


@dataclass(frozen=True)
class Model:
    """Size, family and sequence limit of a model."""

    size: ModelSize
    family: Family
    positions: int | None  # maximum sequence length, or None


def read_model(name: str) -> Model:
    """Read the model's dimensions from a preset or a folder's config.json. UserError if there is neither."""
    fields = PRESETS.get(name) or _read_config(name)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise bad_setting(f"cannot plan model type {kind!r}; choose one of {known}", model_name=name)
    family, tied = FAMILIES[kind], bool(fields.get("tie_word_embeddings", False))
    present = {field: value for field, value in fields.items() if value is not None}
    if fields.get("use_sliding_window") is False:  # Qwen's config.json has a window, but it is off
        present.pop("sliding_window", None)
    try:
        shape = ModelShape.from_hf_config(SimpleNamespace(**present))
    except AttributeError as error:
        raise bad_setting(f"its config.json has no {error.name}", model_name=name) from None
    size = ModelSize(_parameters(shape, family, tied=tied), shape, tied, family.qk_norm)
    return Model(size, family, fields.get("max_position_embeddings"))


def _read_config(name: str) -> dict:
    try:
        return read_json(Path(name) / "config.json")
    except UnreadableFile as error:
        near = closest_preset(name.rpartition("/")[2])
        way_out = f"did you mean {near!r}?" if near else "correct it"
        reason = f"neither a preset (te_models/presets.py) nor a folder with a config.json ({error.reason})"
        raise bad_setting(f"{reason}; {way_out}", model_name=name) from None


def _parameters(shape: ModelShape, family: Family, *, tied: bool) -> int:
    size = ModelSize(0, shape, tied)
    layer = 2 * shape.hidden_size  # norms
    if family.qkv_bias:
        layer += (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if family.qk_norm:
        layer += 2 * shape.head_dim
    return size.gemm_weights + shape.num_layers * layer + size.root_weights


def refuse_what_training_refuses(cfg: Config, model: Model, gpus_per_node: int) -> None:
    """Raise the UserError that training would raise for this model's layers, precision or sequence length."""
    name, shape = cfg.model.model_name, model.size.shape
    cfg.data.check_length(model.positions)
    if not shape.sees_all(length := cfg.data.max_seq_length):
        reason = f"predictions do not cover the sliding window of {shape.window} tokens; use at most that"
        raise bad_setting(reason, max_seq_length=length)
    from fp8_suite.training.precision import checks, precision_map  # here because they import torch

    if cfg.model.use_te and Path(name, "config.json").exists():  # TE supports all presets
        from transformers import AutoConfig

        if reason := model.family.unsupported(AutoConfig.from_pretrained(name)):
            raise bad_setting(f"{reason}; drop --use_te", use_te=True, model_name=name)
    precision_map.assign(cfg, precision_map.te_names(shape.num_layers), shape.num_layers)
    checks.check_part(cfg, shape=shape, gpus_per_node=gpus_per_node)


def size_run(cfg: Config, *, gpu: Gpu, gpus: int, gpus_per_node: int) -> Sizing:
    """Choose mode, optimizer and sizes as training would. UserError for what it or the planner refuses."""
    mode, per_node = cfg.sharding.sharding_mode, min(gpus, gpus_per_node)
    if cfg.optim.max_steps == 0:
        raise bad_setting("evaluates only, and plans are of training; drop it", max_steps=0)
    if rule := why_unpredicted(cfg, mode):
        settings, reason = rule
        raise bad_setting(reason, **settings)
    model, memory = read_model(cfg.model.model_name), int(gpu.memory_gb * 1e9)
    check_layout(Layout(**cfg.sharding.layout), model.size.shape, per_node, cfg.data.max_seq_length)
    check_number_of_ranks(cfg, cfg.sharding.data_ranks(gpus))
    refuse_what_training_refuses(cfg, model, per_node)
    if gpus == 1 and (mode == AUTO or not MODES[mode].offload):
        mode = "single"
    request, _ = make_setup(cfg, model.size, mode, gpus, per_node, memory)
    assert rank_setups(request)[0].shards  # UserError if --hsdp_shard_size does not divide the ranks
    return choose_sizes(request, memory, gpu)
