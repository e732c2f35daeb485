"""What runs, settled before any weight is read: precision, model, and whether the two go together."""

from __future__ import annotations

from dataclasses import dataclass

from core.recipes import FALLBACK_RECIPE, TORCHAO_RECIPES
from te_models import build as te_models
from te_models.build import ModelPlan
from training.config import Config
from training.optim import optimizer as optim
from training.parallel import ranks
from training.parallel.ranks import print_rank0
from training.precision import checks, precision_map, torchao_fp8
from training.precision import recipes as precision
from training.precision.recipes import Precision
from training.tracking.metrics import ModelShape


@dataclass(frozen=True)
class Decision:
    precision: Precision
    plan: ModelPlan
    shape: ModelShape | None  # None: a kind of model whose dimensions tell too little
    counted: ModelShape | None  # `shape`, if it tells the FLOPs of this run
    model_files: dict[str, str]  # what tells the model of one rank from another's; empty for one rank


def decide(cfg: Config) -> Decision:
    """Settle what runs, and say of it what a user must know.

    ValueError, RuntimeError: it cannot run here, or settings do not go together.
    """
    resolved = precision.resolve_precision(cfg)
    torchao_fp8.silence_import()  # transformers loads it, too, wherever it is installed
    if resolved.effective in TORCHAO_RECIPES:
        torchao_fp8.require_torchao()
    plan = te_models.plan_model(
        cfg.model.model_name,
        init=cfg.model.init,
        use_te=cfg.model.use_te,
        cache_dir=cfg.model.weights_cache_dir,
        trust_remote_code=cfg.model.trust_remote_code,
    )
    resolved = precision_map.resolve(cfg, resolved, plan.config.get_text_config())
    for reason in filter(None, [resolved.fallback_reason, *resolved.map_fallbacks.values()]):
        rule = "!" * 100
        print_rank0(f"{rule}\nWARNING: {reason}\nRUNNING INSTEAD: {FALLBACK_RECIPE} scaling\n{rule}")
    shape = ModelShape.from_hf_config(plan.config)
    counted = _counted(cfg, plan, shape)
    _check(cfg, resolved, plan, shape)
    for said in filter(None, [checks.unused_fp8_flags(cfg, resolved), cfg.log.unread()]):
        print_rank0(f"WARNING: {said}")
    if cfg.precision.master_weights == "none":
        print_rank0(optim.MASTER_NONE_WARNING)
    files = te_models.identity(plan) if ranks.world_size() > 1 else {}
    return Decision(resolved, plan, shape, counted, files)


def _counted(cfg: Config, plan: ModelPlan, shape: ModelShape | None) -> ModelShape | None:
    left_out = "TFLOP/s and MFU are left out"
    if shape is None:
        print_rank0(f"{left_out}: FLOPs of model type {plan.family} are not known")
    elif not shape.sees_all(length := cfg.data.max_seq_length):
        print_rank0(f"{left_out}: attention sees {shape.window} of --max_seq_length {length} tokens")
    else:
        return shape
    return None


def _check(cfg: Config, resolved: Precision, plan: ModelPlan, shape: ModelShape | None) -> None:
    """Refuse a precision that this model cannot have."""
    if shape is not None and cfg.model.use_te:
        checks.check_sizes(resolved, plan.name, shape.gemm_sizes)
        checks.check_fp8_attention(cfg, resolved, shape.head_dim)
    checks.check_settings(cfg, resolved)
    if cfg.precision.fp8_lm_head:
        text = plan.config.get_text_config()
        sizes = {"hidden size": text.hidden_size, "vocabulary": text.vocab_size}
        plain = cfg.model.use_te or plan.of_known_family
        checks.check_lm_head(cfg, resolved, sizes, plain=plain)
