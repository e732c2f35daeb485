"""What a run with tensor parallelism can be."""

from __future__ import annotations

from dataclasses import replace

from fp8_suite.core.errors import bad_setting
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import Layout, check_layout
from fp8_suite.training.optim import moments
from fp8_suite.training.parallel.settings import DEEPSPEED_MODES
from fp8_suite.training.precision.settings import parse_moment_dtype


def rank_shape(cfg: Config, shape: ModelShape) -> ModelShape:
    """Return the dimensions of the layers that one rank holds, for its GEMMs."""
    size = cfg.sharding.tensor_parallel_size
    return replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=shape.num_kv_heads // size,
        ffn_hidden_size=shape.ffn_hidden_size // size,
        vocab_size=shape.vocab_size // size,
    )


def refuse_settings(cfg: Config) -> None:
    """Raise UserError for settings that do not run with tensor parallelism."""
    if (size := cfg.sharding.tensor_parallel_size) == 1:
        return
    mode = cfg.sharding.sharding_mode
    if not cfg.model.use_te:
        reason = "ranks share Transformer Engine layers only; add --use_te"
        raise bad_setting(reason, tensor_parallel_size=size, use_te=False)
    if mode in DEEPSPEED_MODES:
        reason = "DeepSpeed does not share layers; choose ddp, fsdp_full, fsdp_grad or hsdp"
        raise bad_setting(reason, tensor_parallel_size=size, sharding_mode=mode)
    excluded = {
        "lora_rank": cfg.lora.enabled,
        "offload_optimizer": cfg.sharding.offload_optimizer,
        "fp8_weights": cfg.precision.fp8_weights,
        "fp8_all_gather": cfg.sharding.fp8_all_gather,
        "fp8_lm_head": cfg.precision.fp8_lm_head,
    }
    values = cfg.to_dict()
    if refused := {name: values[name] for name, applies in excluded.items() if applies}:
        raise bad_setting(
            "does not run with tensor parallelism; drop one", tensor_parallel_size=size, **refused
        )


def refuse_sizes(cfg: Config, shape: ModelShape, gpus: int, gpus_per_node: int) -> None:
    """Raise UserError for a number of ranks that cannot share this model's layers."""
    if (size := cfg.sharding.tensor_parallel_size) == 1:
        return
    cfg.sharding.data_ranks(gpus)
    check_layout(Layout(tp=size), shape, gpus, gpus_per_node, cfg.data.max_seq_length)
    part = rank_shape(cfg, shape)
    widths = part.num_heads * part.head_dim, part.ffn_hidden_size
    in_blocks = any(moments.FORMATS[name].mantissa for name in parse_moment_dtype(cfg.precision.moment_dtype))
    if in_blocks and any(width % moments.BLOCK and width * size % moments.BLOCK == 0 for width in widths):
        reason = f"moments have blocks of {moments.BLOCK} columns, and a rank has {widths[0]} and {widths[1]}"
        settings = {"moment_dtype": cfg.precision.moment_dtype, "tensor_parallel_size": size}
        raise bad_setting(f"{reason}; use fp32 or bf16, or fewer ranks", **settings)
