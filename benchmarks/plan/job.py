"""A training job as a plan sees it: the model's dimensions, and the settings that memory and time hang on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from core.errors import first_line
from training.config import Config
from training.tracking.metrics import ModelShape, matmul_parameters

if TYPE_CHECKING:  # it imports torch
    from te_models.families import Family


@dataclass(frozen=True)
class Model:
    """Dimensions and parameters of a model that can be planned."""

    shape: ModelShape
    family: Family
    tied: bool
    positions: int | None

    @property
    def gemm_weights(self) -> int:
        """Weights of the decoder's linear layers, which FP8 recipes cast."""
        return matmul_parameters(self.shape) - self.head

    @property
    def head(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def root(self) -> int:
        """Embedding, LM head and final norm: one FSDP group, gathered throughout."""
        return self.head * (1 if self.tied else 2) + self.shape.hidden_size

    @property
    def parameters(self) -> int:
        s = self.shape
        layer = 2 * s.hidden_size
        if self.family.qkv_bias:
            layer += (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        if self.family.qk_norm:
            layer += 2 * s.head_dim
        return self.gemm_weights + s.num_layers * layer + self.root

    @property
    def block(self) -> float:
        return (self.parameters - self.root) / self.shape.num_layers


def read_model(name: str, **changes: int) -> Model:
    """Dimensions of a preset, with `changes`, or of a folder's config.json. ValueError for anything else."""
    from te_models.families import FAMILIES  # imports torch
    from te_models.presets import PRESETS, closest_preset

    if name in PRESETS:
        fields = PRESETS[name] | changes
    else:
        try:
            fields = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            near = closest_preset(name.rpartition("/")[2])
            question = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"--model_name {name}: neither a preset nor a folder with a config.json "
                f"({getattr(error, 'strerror', None) or error}); presets: te_models/presets.py{question}"
            ) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"--model_name {name}: model type {kind!r} cannot be planned; those that can: "
            + ", ".join(sorted(FAMILIES))
        )
    try:
        if fields.get("use_sliding_window") is False:  # Qwen's files name a window all the same
            fields = fields | {"sliding_window": None}
        shape = ModelShape.from_hf_config(SimpleNamespace(**fields))
    except AttributeError as error:
        raise ValueError(f"--model_name {name}: its config.json has no {error.name}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--model_name {name}: the sizes in its config.json are no model's ({error})"
        ) from None
    tied, positions = fields.get("tie_word_embeddings", False), fields.get("max_position_embeddings")
    layers = shape.num_layers
    if not isinstance(layers, int) or layers < 1 or not isinstance(positions, int | None):
        raise ValueError(
            f"--model_name {name}: its config.json has {layers!r} layers and {positions!r} positions"
        )
    return Model(shape, FAMILIES[kind], bool(tied), positions)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job: what of a configuration decides memory and time, and the GPUs it runs on."""

    model: Model
    recipe: str
    use_te: bool
    batch: int
    length: int
    accumulation: int
    recompute: bool
    masters: bool
    moment_bytes: int  # of one of Adam's two moments
    mode: str
    gpus: int
    gpus_per_node: int
    shard: int  # GPUs that hold one copy of the model; 1 where it is whole
    grad_fp32: bool
    fp8_all_gather: bool
    fp8_layers: float  # share of the decoder layers under the recipe
    fp8_weight_cache: bool
    fp8_head: bool
    flash_attention: bool
    slow_adam: bool  # TE's, which steps FP8 weights, or torch's in ZeRO, not the suite's own
    two_chunks: bool = False  # older code: a chunk of logits and its predecessor, before one was freed first

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one GPU."""
        return self.batch * self.length

    @property
    def sharded(self) -> bool:
        return self.mode in ("fsdp_full", "fsdp_grad", "fsdp_offload", "hsdp")

    @property
    def zero(self) -> int:
        """DeepSpeed's stage, 0 without it."""
        return int(self.mode[7]) if self.mode.startswith("ds_zero") else 0

    @property
    def offload(self) -> bool:
        return self.mode.endswith("offload")

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def keeps_fp8_weights(self) -> bool:
        """Whether FP8 weights outlive a micro-batch, for the step's others."""
        whole = self.mode in ("single", "ddp") or (self.mode == "fsdp_grad" and not self.fp8_all_gather)
        return (
            self.use_te and self.fp8_weight_cache and whole and self.accumulation > 1 and not self.recompute
        )

    @property
    def two_layouts(self) -> bool:
        """Whether FP8 weights are kept until backward: under FSDP2 TE casts them again, unless cached."""
        kept = not self.sharded or self.keeps_fp8_weights
        return self.use_te and kept and not self.recompute


def recipe_of(cfg: Config) -> str:
    if cfg.precision.mixed_precision == "fp32":
        raise ValueError("--mixed_precision fp32: plans cover bf16 and fp8")
    if cfg.precision.precision_map:
        raise ValueError(
            f"--precision_map {cfg.precision.precision_map}: plans cover whole layers; use "
            "--bf16_first_layers and --bf16_last_layers"
        )
    if cfg.precision.fp8_attention:
        raise ValueError("--fp8_attention: plans cover attention in BF16, the only one with recorded runs")
    if cfg.optim.deterministic and cfg.model.use_te and not cfg.model.flash_attention:
        raise ValueError(
            "--deterministic --no_flash_attention: packed batches may run TE's attention unfused then, which "
            "plans do not cover; leave out one of them"
        )
    if cfg.precision.mixed_precision == "bf16":
        if cfg.precision.fp8_lm_head:
            raise ValueError("--fp8_lm_head --mixed_precision bf16: it is for FP8; drop one of them")
        return "bf16"
    return cfg.recipe


def refuse_precision(cfg: Config, model: Model) -> None:
    """ValueError where training would refuse this model's layers, or settings of its precision."""
    from training.precision import checks  # imports torch

    name, shape, recipe = cfg.model.model_name, model.shape, recipe_of(cfg)
    if cfg.model.use_te and Path(name, "config.json").exists():  # presets have a TE form
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(name)
        except Exception as error:  # its checks raise errors of their own
            raise ValueError(f"--model_name {name}: its config.json: {first_line(error)}") from None
        if reason := model.family.unsupported(config):
            raise ValueError(f"--use_te --model_name {name}: {reason}; plan it without --use_te")
    if recipe == "bf16":
        return
    checks.check_flags_apply(cfg, {recipe})
    if cfg.model.use_te:
        checks.check_recipe_sizes(recipe, name, shape.gemm_sizes)
    if cfg.precision.fp8_lm_head:
        checks.check_lm_head_sizes(name, {"hidden size": shape.hidden_size, "vocabulary": shape.vocab_size})


def build_job(cfg: Config, model: Model, *, mode: str, gpus: int, gpus_per_node: int) -> Job:
    """The job of a configuration in this sharding mode.

    ValueError for a shard size that does not divide, for sequences that the model cannot see all of, and for
    what training refuses.
    """
    refuse_precision(cfg, model)
    length = cfg.data.max_seq_length
    cfg.data.check_length(model.positions)
    if not model.shape.sees_all(length):
        raise ValueError(
            f"--max_seq_length {length}: --model_name attends to {model.shape.window} tokens at once, which "
            "plans do not cover; lower it"
        )
    layers = model.shape.num_layers
    first, last = cfg.precision.bf16_first_layers, cfg.precision.bf16_last_layers
    if first + last and (first + last >= layers or cfg.precision.mixed_precision != "fp8"):
        raise ValueError(
            f"--bf16_first_layers {first} --bf16_last_layers {last}: are for --mixed_precision fp8 and fewer "
            f"than the model's {layers} layers; drop them, or use --mixed_precision bf16 without them"
        )
    gathers = cfg.sharding.fp8_all_gather and mode != "single"  # one GPU has nothing to gather
    shard = {"single": 1, "ddp": 1, "hsdp": cfg.sharding.hsdp_shard_size or min(gpus, gpus_per_node)}
    if mode == "hsdp" and gpus % shard["hsdp"]:
        raise ValueError(
            f"--hsdp_shard_size {shard['hsdp']}: does not divide the {gpus} GPUs of --gpus; give another"
        )
    return Job(
        model=model,
        recipe=recipe_of(cfg),
        use_te=cfg.model.use_te,
        batch=cfg.optim.batch_size,
        length=length,
        accumulation=cfg.optim.gradient_accumulation_steps,
        recompute=cfg.model.gradient_checkpointing,
        masters=cfg.precision.master_weights == "fp32",
        moment_bytes=4 if cfg.precision.moment_dtype == "fp32" else 2,
        mode=mode,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        shard=shard.get(mode, gpus),
        grad_fp32=cfg.sharding.grad_reduce_dtype == "fp32",
        fp8_all_gather=gathers,
        fp8_layers=1 - (first + last) / layers,
        fp8_weight_cache=cfg.precision.fp8_weight_cache,
        fp8_head=cfg.precision.fp8_lm_head,
        flash_attention=cfg.model.flash_attention,
        slow_adam=mode.startswith("ds_") or (gathers and cfg.model.use_te),
    )
