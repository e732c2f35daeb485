"""Build the job to plan: model dimensions, and the sharding mode that training would use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError, bad_setting, first_line
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.te_models.families import FAMILIES, Family
from fp8_suite.te_models.presets import PRESETS, closest_preset
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.estimate.sizes import Sizing, check_launch, choose_sizes, unpredicted
from fp8_suite.training.parallel.settings import MODES


@dataclass(frozen=True)
class Model:
    """Size, family and sequence limit of a model."""

    size: ModelSize
    family: Family
    positions: int | None  # maximum sequence length, or None


def read_model(name: str) -> Model:
    """Read the model's dimensions from a preset or a folder's config.json. UserError if there is neither."""
    file = Path(name) / "config.json"
    try:
        fields = PRESETS.get(name) or read_json(file)
    except UnreadableFile as error:
        if file.is_file():
            raise bad_setting(f"its config.json: {error.reason}", model_name=name) from None
        near = closest_preset(name.rpartition("/")[2])
        reason = error.reason
        raise bad_setting(
            f"neither a preset (te_models/presets.py) nor a folder with a config.json ({reason})"
            + (f"; did you mean {near!r}?" if near else "; correct it"),
            model_name=name,
        ) from None
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise bad_setting(f"cannot plan model type {kind!r}; choose one of {known}", model_name=name)
    family, tied = FAMILIES[kind], bool(fields.get("tie_word_embeddings", False))
    if fields.get("use_sliding_window") is False:  # Qwen's config.json has a window, but it is off
        fields = fields | {"sliding_window": None}
    try:
        shape = ModelShape.from_hf_config(SimpleNamespace(**fields))
        size = ModelSize(_parameters(shape, family, tied=tied), shape, tied, family.qk_norm)
        if shape.num_layers < 1:
            raise ValueError("no layers")
        positions = fields.get("max_position_embeddings")
        return Model(size, family, None if positions is None else int(positions))
    except AttributeError as error:
        raise bad_setting(f"its config.json has no {error.name}", model_name=name) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise bad_setting(f"its config.json has no valid sizes ({error})", model_name=name) from None


def _parameters(shape: ModelShape, family: Family, *, tied: bool) -> int:
    size = ModelSize(0, shape, tied)
    layer = 2 * shape.hidden_size  # norms
    if family.qkv_bias:
        layer += (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if family.qk_norm:
        layer += 2 * shape.head_dim
    return size.gemm_weights + shape.num_layers * layer + size.root


def refuse_unplanned(cfg: Config) -> None:
    """Raise UserError for settings that the planner does not cover."""
    if found := unpredicted(cfg, cfg.sharding.sharding_mode):
        reason, settings = found
        raise bad_setting(reason, **settings)


def refuse_what_training_refuses(cfg: Config, model: Model) -> None:
    """Raise the UserError that training would raise for this model's layers, precision or sequence length."""
    from fp8_suite.training.precision import checks, precision_map  # imported here because they import torch

    name, shape = cfg.model.model_name, model.size.shape
    if cfg.model.use_te and Path(name, "config.json").exists():  # TE supports all presets
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(name)
        except Exception as error:  # transformers raises many types of error here
            raise bad_setting(f"its config.json: {first_line(error)}", model_name=name) from None
        if reason := model.family.unsupported(config):
            raise bad_setting(f"{reason}; drop --use_te", use_te=True, model_name=name)
    precision_map.assign(cfg, precision_map.te_names(shape.num_layers), shape.num_layers)
    if cfg.precision.mixed_precision == "fp8":
        checks.check_flags_apply(cfg, {cfg.recipe})
        if cfg.model.use_te:
            checks.check_gemm_sizes(cfg.recipe, shape.gemm_sizes, fp8_scenario=cfg.recipe, model_name=name)
        if cfg.precision.fp8_lm_head:
            checks.check_lm_head(name, shape.hidden_size, shape.vocab_size)
    cfg.data.check_length(model.positions)
    if not shape.sees_all(length := cfg.data.max_seq_length):
        reason = f"predictions do not cover the sliding window of {shape.window} tokens; use at most that"
        raise bad_setting(reason, max_seq_length=length)


def build_job(cfg: Config, *, gpu: Gpu, gpus: int, gpus_per_node: int) -> tuple[Sizing, str | None]:
    """Fit the job to GPUs. Also return why training refuses the mode that `auto` chooses, or None."""
    from fp8_suite.training.estimate.choose import choose_mode
    from fp8_suite.training.optim.optimizer import choose_optimizer  # imported here because they import torch

    refuse_unplanned(cfg)
    check_launch(cfg, gpus)
    model, mode = read_model(cfg.model.model_name), cfg.sharding.sharding_mode
    memory = int(gpu.memory_gb * 1e9)
    refuse_what_training_refuses(cfg, model)
    optimizer = choose_optimizer(cfg, "single", on_gpu=True)
    job = TrainingSetup(cfg, model.size, optimizer, "single", gpus, min(gpus, gpus_per_node))
    if mode == "auto":
        mode = "single" if gpus == 1 else choose_mode(job, memory)[0]
    elif gpus == 1 and not MODES[mode].offload:
        mode = "single"
    job, refusal = replace(job, mode=mode), None
    if MODES[mode].in_groups:
        cfg.sharding.shard_size(gpus, job.gpus_per_node)  # UserError if it does not divide the GPUs
    try:
        job = replace(job, optimizer=choose_optimizer(cfg, mode, on_gpu=True))
    except UserError as error:
        refusal = f"--sharding_mode {mode}: {error}"
        if cfg.sharding.sharding_mode != "auto":
            raise UserError(refusal, flags=["sharding_mode"], exit_code=EXIT_BAD_SETTING) from None
    return choose_sizes(job, memory, gpu), refusal
