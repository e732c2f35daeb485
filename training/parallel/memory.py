"""GPU memory of a training step, computed from tensor sizes, for `benchmarks.plan`.

For --sharding_mode auto `choose` has its own sum, and reads only `accumulated_gradients`. Sizes are bytes
on one GPU. 1 GB is 10^9 bytes, as in summary.json. This module must not import torch, so that
`benchmarks.plan` shows its help and refuses wrong flags at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import bad_setting
from core.recipes import costs_of
from training.config import Config
from training.parallel.settings import MODES, Mode
from training.tracking.metrics import ModelShape, matmul_parameters

if TYPE_CHECKING:  # imports torch
    from training.optim.optimizer import OptimizerPlan

LOGITS_CHUNK = 2**30  # CHUNK_BYTES in te_models/loss.py
TOKENS_OF_A_HEAD_GEMM = 8192  # TOKENS_PER_GEMM in te_models/loss_fp8.py
# Workspaces of cuBLAS and TE, RoPE angles and the batch: what recorded runs use beyond the counted tensors.
FIXED = 0.1e9
# From ds_configs/zero3.json: up to 1e9 gathered BF16 parameters (stage3_max_live_parameters).
ZERO_LIVE = 2 * 1e9
# Two buckets (overlap_comm) of 2e8 BF16 gradients each (reduce_bucket_size).
ZERO_BUCKETS = 2 * 2 * 2e8


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters, and the dimensions that determine activations and gathered weights."""

    parameters: int
    shape: ModelShape | None = None  # None: only weights, gradients and optimizer state can be counted
    tied: bool = False
    qk_norm: bool = False

    @property
    def gemm_weights(self) -> int:
        """Number of weights in the decoder's linear layers, which FP8 recipes cast."""
        return matmul_parameters(self.shape) - self.head

    @property
    def head(self) -> int:
        """Number of weights in the LM head."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def root(self) -> int:
        """Number of weights in embedding, LM head and final norm, which FSDP gathers as one group."""
        return self.head * (1 if self.tied else 2) + self.shape.hidden_size

    @property
    def block(self) -> float:
        """Number of weights in one decoder layer."""
        return (self.parameters - self.root) / self.shape.num_layers


@dataclass(frozen=True)
class StepPlan:
    """Inputs of the memory and time models: settings, model size, optimizer, sharding mode and GPUs."""

    cfg: Config
    model: ModelSize
    optimizer: OptimizerPlan
    mode: str
    gpus: int
    gpus_per_node: int

    @property
    def sharding(self) -> Mode:
        return MODES[self.mode]

    @property
    def shards(self) -> int:
        """Number of parts of the optimizer state, one per GPU; 1 if every GPU has all of it."""
        if self.sharding.in_groups:
            return hsdp_shard_size(self.cfg, self.gpus, self.gpus_per_node)
        return self.gpus if self.sharding.engine in ("fsdp", "deepspeed") else 1

    @property
    def fsdp(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.sharding.engine == "fsdp"

    @property
    def accumulates_in_zero1(self) -> bool:
        """True for ZeRO 1 with accumulation: DeepSpeed then keeps unsharded FP32 gradients on every GPU."""
        return self.sharding.stage == 1 and self.accumulation > 1

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.cfg.optim.batch_size * self.cfg.data.max_seq_length

    @property
    def accumulation(self) -> int:
        return self.cfg.optim.gradient_accumulation_steps

    @property
    def recompute(self) -> bool:
        return self.cfg.model.gradient_checkpointing

    @property
    def recipe(self) -> str:
        return self.cfg.recipe if self.cfg.precision.mixed_precision == "fp8" else "bf16"

    @property
    def fp8_layers(self) -> float:
        """Fraction of the decoder layers that run in the FP8 recipe."""
        precision = self.cfg.precision
        in_bf16 = precision.bf16_first_layers + precision.bf16_last_layers
        return 1 - in_bf16 / self.model.shape.num_layers

    @property
    def gathers_fp8(self) -> bool:
        """True if FSDP all-gathers weights in FP8."""
        return self.cfg.sharding.fp8_all_gather and self.fsdp

    @property
    def caches_fp8_weights(self) -> bool:
        """True if the FP8 copies of the weights are reused by all micro-batches of a step."""
        cfg = self.cfg
        enabled = cfg.model.use_te and cfg.precision.fp8_weight_cache and not self.recompute
        unsharded = self.mode in ("single", "ddp") or (self.sharding.gathers_once and not self.gathers_fp8)
        return enabled and unsharded and self.accumulation > 1

    @property
    def keeps_fp8_weights(self) -> bool:
        """True if FP8 copies of the weights are kept from forward to backward.

        Under FSDP2 TE casts the weights again in backward, unless the copies are cached.
        """
        kept = not self.fsdp or self.caches_fp8_weights
        return self.cfg.model.use_te and kept and not self.recompute


def hsdp_shard_size(cfg: Config, gpus: int, gpus_per_node: int) -> int:
    """Return the number of ranks that share one copy of the model. UserError if it does not divide `gpus`."""
    size = cfg.sharding.hsdp_shard_size or min(gpus, gpus_per_node)
    if gpus % size:
        raise bad_setting(
            f"does not divide the {gpus} ranks; use a divisor, or --sharding_mode fsdp_full",
            hsdp_shard_size=size,
        )
    return size


# Terms of the sum


def state(plan: StepPlan) -> dict[str, float]:
    """Return the bytes of weights, master weights and moments between steps."""
    if plan.sharding.offload:
        return {"weights": 0.0, "master weights": 0.0, "moments": 0.0}
    optimizer, parameters = plan.optimizer, plan.model.parameters
    shard = parameters / plan.shards
    weight, moments = optimizer.parameter_dtype.itemsize, optimizer.moment_bytes
    # state_bytes counts weight and gradient, of the same size.
    masters = (optimizer.state_bytes - 2 * weight - moments) * shard
    weights = weight * (parameters if plan.sharding.stage in (1, 2) else shard)
    if plan.gathers_fp8 and plan.cfg.model.use_te:
        # FP8 weights and FP32 masters take 1 + 4 bytes, BF16 weights and 16-bit remainders 2 + 2.
        weights -= plan.model.gemm_weights / plan.shards
        masters += 2 * plan.model.gemm_weights / plan.shards
    return {"weights": weights, "master weights": masters, "moments": moments * shard}


def accumulated_gradients(plan: StepPlan) -> float:
    """Return the bytes of gradients kept between micro-batches.

    ZeRO 3's gradients and DDP's buckets are also kept between steps.
    """
    parameters, stage = plan.model.parameters, plan.sharding.stage
    if plan.mode == "ddp":
        return 2.0 * parameters
    if stage and not plan.sharding.offload:
        if plan.accumulates_in_zero1:
            return 4.0 * parameters
        if plan.accumulation > 1:
            return 4.0 * parameters / plan.gpus
        return 2.0 * parameters / plan.gpus if stage == 3 else 0.0
    if stage or plan.accumulation == 1:
        return 0.0
    return (4.0 if plan.cfg.sharding.grad_reduce_dtype == "fp32" else 2.0) * parameters


def gathered_weights(plan: StepPlan) -> float:
    """Return the bytes of gathered weights and communication buffers when backward begins."""
    model, sharding = plan.model, plan.sharding
    if sharding.stage == 3:
        return 2 * model.root + ZERO_LIVE + ZERO_BUCKETS
    if plan.mode == "ddp" and plan.nodes > 1 and plan.cfg.sharding.grad_reduce_dtype == "fp32":
        return 4.0 * model.parameters  # buffers of the FP32 all-reduce, until the next backward
    if not plan.fsdp:
        return 0.0
    return 2.0 * (model.parameters if sharding.gathers_once else model.root + model.block)


def fp8_copies(plan: StepPlan) -> float:
    """Return the bytes of FP8 copies of all GEMM weights."""
    return costs_of(plan.recipe).weight_copies * plan.model.gemm_weights * plan.fp8_layers


def layer_activations(plan: StepPlan) -> float:
    """Return the bytes of activations that one layer saves for backward.

    In BF16 these are, per token: input, attention norm, residual and MLP norm (hidden size each); queries and
    attention output (width of the query heads); keys and values (width of the key heads); gate, up and their
    product (MLP width). FP8 recipes store less (`core.recipes`). TE's QK norms (Qwen3) add theirs.
    """
    s, costs = plan.model.shape, costs_of(plan.recipe)
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    bf16 = 2 * (4 * s.hidden_size + 2 * queries + 2 * keys + 3 * s.ffn_hidden_size)
    if plan.cfg.model.use_te and plan.model.qk_norm:
        bf16 += 2 * (queries + 2 * keys)
    less = costs.less_per_ffn * s.ffn_hidden_size + costs.less_per_hidden * s.hidden_size
    return plan.tokens * (bf16 - less * plan.fp8_layers)


def logits(plan: StepPlan) -> float:
    """Return the peak bytes of the loss: a chunk of logits, the LM head's gradient, and hidden states.

    With several chunks the gradient accumulates in FP32; its BF16 copy exists after the last chunk is freed.
    """
    if plan.cfg.precision.fp8_lm_head:
        return _logits_fp8(plan)
    s, head = plan.model.shape, plan.model.head
    rows = min(plan.tokens, LOGITS_CHUNK // (2 * s.vocab_size))
    chunk = 2.0 * rows * s.vocab_size
    hidden = 3 * 2.0 * plan.tokens * s.hidden_size  # output of the last layer, its norm, and their gradient
    if rows == plan.tokens:
        return chunk + 2 * head + hidden
    return 4 * head + max(chunk, 2 * head) + hidden


def _logits_fp8(plan: StepPlan) -> float:
    """Return the peak bytes of the loss with an FP8 LM head.

    Kept throughout: both FP8 layouts of the head's weight, the transposed FP8 gradients of one GEMM's logits,
    and hidden states. In addition: a chunk of logits with its FP8 gradient, and the head's gradient. With one
    GEMM the head's gradient is BF16 and follows the chunk; with several it is FP32 and exists beside it.
    """
    s, head = plan.model.shape, plan.model.head
    tokens = min(plan.tokens, TOKENS_OF_A_HEAD_GEMM)
    several = plan.tokens > tokens
    rows = min(tokens, max(128, LOGITS_CHUNK // (2 * s.vocab_size) // 128 * 128))
    chunk = (2.0 + 1.0) * rows * s.vocab_size
    gradient = (4.0 if several else 2.0) * head
    kept = 2.0 * head + tokens * s.vocab_size + 4 * 2.0 * plan.tokens * s.hidden_size
    return kept + (gradient + chunk if several else max(gradient, chunk))


def host_bytes(plan: StepPlan) -> tuple[float, int]:
    """Return host memory of offloading in bytes per parameter: (always, additionally during a save).

    DeepSpeed keeps FP32 masters, gradients and moments, and BF16 weights and gradients; with accumulation the
    latter are FP32 too. A save copies masters and moments. FSDP2 keeps weights, gradients and moments; a save
    splits FP32 weights into two 16-bit halves.
    """
    if plan.sharding.engine == "deepspeed":
        return 20 + 2 * (plan.accumulation > 1), 12
    return plan.optimizer.state_bytes, 4


# Points in a step where memory may peak


def at_loss(plan: StepPlan) -> dict[str, float]:
    """Return the bytes by part when the loss is computed, before backward."""
    layer = 2.0 * plan.tokens * plan.model.shape.hidden_size if plan.recompute else layer_activations(plan)
    return state(plan) | {
        "gradients": accumulated_gradients(plan),
        "FP8 weight copies": fp8_copies(plan) * plan.keeps_fp8_weights,
        "activations": plan.model.shape.num_layers * layer,
        "logits and head gradient": logits(plan),
        "gathered, communication": gathered_weights(plan),
        "fixed": FIXED,
    }


def start_of_backward(plan: StepPlan) -> dict[str, float]:
    """Return the bytes by part in backward of the last layer, with new gradients and all activations."""
    model, parts, s = plan.model, at_loss(plan), plan.model.shape
    copies = parts["FP8 weight copies"]
    if plan.cfg.model.use_te and not plan.keeps_fp8_weights:
        copies = fp8_copies(plan) / s.num_layers  # TE casts this layer's weights again
    # BF16 gradients of gate, up and product, and two of the hidden size.
    activations = parts["activations"] + 2.0 * plan.tokens * (3 * s.ffn_hidden_size + 2 * s.hidden_size)
    # The next block's gathered weights, and send and receive buffers of this block's gradients, all in BF16.
    communication = 6.0 * model.block if plan.fsdp else 0.0
    return parts | {
        "gradients": parts["gradients"] + 2.0 * model.block,
        "FP8 weight copies": copies,
        "activations": activations + layer_activations(plan) * plan.recompute,
        "logits and head gradient": 2.0 * model.head,
        "gathered, communication": parts["gathered, communication"] + communication,
    }


def after_backward(plan: StepPlan) -> dict[str, float]:
    """Return the bytes by part at the end of backward, with the first layer's activations left."""
    model, parts, sharding = plan.model, at_loss(plan), plan.sharding
    gradients, communication = parts["gradients"], parts["gathered, communication"]
    if plan.fsdp:
        # The root's gradients are reduced last: its gathered weights, gradients, send and receive buffers are
        # BF16. The blocks' weights and gradients are sharded again by then.
        gradients *= model.root / model.parameters
        gradients += 0.0 if sharding.offload else 2.0 * (model.parameters - model.root) / plan.shards
        communication = 8.0 * model.root
        if sharding.in_groups and plan.cfg.sharding.grad_reduce_dtype == "fp32":
            # Inputs of the FP32 all-reduce between replicas live until backward ends.
            communication += 4.0 * model.parameters / plan.shards
    elif sharding.stage in (1, 2):
        communication = ZERO_BUCKETS
        gradients = max(gradients, 2.0 * model.parameters / plan.gpus)
    elif not sharding.stage:
        gradients = max(gradients, 2.0 * model.parameters)
    cached = 1.0 if plan.caches_fp8_weights else 1 / model.shape.num_layers
    return parts | {
        "gradients": gradients,
        "FP8 weight copies": parts["FP8 weight copies"] * cached,
        "activations": 0.0 if plan.fsdp else layer_activations(plan),
        "logits and head gradient": 0.0,
        "gathered, communication": communication,
    }


def at_step(plan: StepPlan) -> dict[str, float]:
    """Return the bytes by part in the optimizer step of ZeRO 1 or 2, which copies its gradients to FP32.

    Derived from DeepSpeed's code: no recorded run has its peak here.
    """
    parts = after_backward(plan)
    copies = 0.0 if plan.accumulates_in_zero1 else 4.0 * plan.model.parameters / plan.gpus
    gradients = parts["gradients"] + copies
    return parts | {"gradients": gradients, "activations": 0.0, "gathered, communication": 0.0}


def peak(plan: StepPlan) -> dict[str, float]:
    """Return the bytes by part at the point of the step with the largest sum."""
    points = [at_loss, start_of_backward, after_backward]
    points += [at_step] if plan.sharding.stage in (1, 2) else []
    return max((point(plan) for point in points), key=lambda parts: sum(parts.values()))
