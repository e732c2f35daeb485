"""Memory of a training step, counted tensor by tensor, for --sharding_mode auto and `benchmarks.plan`.

T tokens of a micro-batch, D hidden size, Q width of all query heads, K of all key heads, F feed-forward size.
Sizes are bytes on one GPU; GB are 10^9 bytes, as in summary.json. It must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core.errors import bad_setting
from core.recipes import costs_of
from training.config import Config
from training.parallel.settings import MODES, Mode
from training.tracking.metrics import ModelShape, matmul_parameters

if TYPE_CHECKING:  # it imports torch
    from training.optim.optimizer import OptimizerPlan

LOGITS_CHUNK = 2**30  # te_models/loss.py, CHUNK_BYTES
TOKENS_OF_A_HEAD_GEMM = 8192  # te_models/loss_fp8.py, TOKENS_PER_GEMM
# Workspaces of cuBLAS and TE, RoPE angles, the batch: the remainder in all recorded runs after counting.
FIXED = 0.1e9
# ZeRO 3 keeps up to 1e9 gathered parameters (stage3_max_live_parameters) and two buckets of 2e8 gradients
# (reduce_bucket_size, twice with overlap_comm): ds_configs/zero3.json. ZeRO 1 and 2 have buckets in backward
# and an FP32 copy of their gradients in the step: read from DeepSpeed's code, no recorded run peaks there.
ZERO_LIVE, ZERO_BUCKETS = 2 * 1e9, 2 * 2 * 2e8


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, and the dimensions that its activations depend on."""

    parameters: int
    shape: ModelShape | None = None  # None: weights, gradients and optimizer state can be counted, no more
    tied: bool = False
    qk_norm: bool = False

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
    def block(self) -> float:
        return (self.parameters - self.root) / self.shape.num_layers


@dataclass(frozen=True)
class Job:
    """A training job: everything that memory and time of its steps depend on."""

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
    def shard(self) -> int:
        """GPUs that hold one copy of weights, gradients and optimizer state; 1 if every GPU has its own."""
        if self.sharding.in_groups:
            return hsdp_shard_size(self.cfg, self.gpus, self.gpus_per_node)
        return self.gpus if self.sharding.engine in ("fsdp", "deepspeed") else 1

    @property
    def fsdp(self) -> bool:
        return self.sharding.engine == "fsdp"

    @property
    def zero_sums_whole(self) -> bool:
        """True where DeepSpeed's ZeRO 1 is a class of its own, which accumulates whole gradients in FP32."""
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
        """Share of the decoder layers that run in the recipe."""
        own = self.cfg.precision
        return 1 - (own.bf16_first_layers + own.bf16_last_layers) / self.model.shape.num_layers

    @property
    def gathers_fp8(self) -> bool:
        return self.cfg.sharding.fp8_all_gather and self.fsdp

    @property
    def caches_fp8_weights(self) -> bool:
        """True if FP8 weights outlive a micro-batch, for the other micro-batches of the step."""
        cfg, whole = self.cfg, self.mode in ("single", "ddp")
        whole = whole or (self.sharding.gathers_once and not self.gathers_fp8)
        wanted = cfg.model.use_te and cfg.precision.fp8_weight_cache
        return wanted and whole and self.accumulation > 1 and not self.recompute

    @property
    def keeps_fp8_weights(self) -> bool:
        """True if FP8 weights live until backward; under FSDP2 TE casts uncached ones again."""
        kept = not self.fsdp or self.caches_fp8_weights
        return self.cfg.model.use_te and kept and not self.recompute


def hsdp_shard_size(cfg: Config, gpus: int, gpus_per_node: int) -> int:
    """Number of ranks that hold one copy of the model together; it must divide all `gpus`."""
    size = cfg.sharding.hsdp_shard_size or min(gpus, gpus_per_node)
    if gpus % size:
        raise bad_setting(
            f"does not divide the {gpus} ranks; use a divisor, or --sharding_mode fsdp_full",
            hsdp_shard_size=size,
        )
    return size


# Terms


def state(job: Job) -> dict[str, float]:
    """Weights, master weights and moments as the optimizer holds them."""
    if job.sharding.offload:
        return {"weights": 0.0, "master weights": 0.0, "moments": 0.0}
    plan, shard = job.optimizer, job.model.parameters / job.shard
    each, moments = plan.parameter_dtype.itemsize, 2 * plan.moment_dtype.itemsize
    whole_weights = job.sharding.stage in (1, 2)
    weights = each * (job.model.parameters if whole_weights else shard)
    masters = (plan.state_bytes - 2 * each - moments) * shard
    if (
        job.gathers_fp8 and job.cfg.model.use_te
    ):  # FP8 weights and whole masters: 1 + 4 instead of 2 + 2 bytes
        weights -= job.model.gemm_weights / job.shard
        masters += 2 * job.model.gemm_weights / job.shard
    return {"weights": weights, "master weights": masters, "moments": moments * shard}


def accumulated_gradients(job: Job) -> float:
    """Gradients kept between micro-batches; ZeRO 3's, and DDP's buckets, between steps too."""
    parameters, stage = job.model.parameters, job.sharding.stage
    if job.mode == "ddp":
        return 2.0 * parameters
    if stage and not job.sharding.offload:
        if job.zero_sums_whole:
            return 4.0 * parameters
        if job.accumulation > 1:
            return 4.0 * parameters / job.gpus
        return 2.0 * parameters / job.gpus if stage == 3 else 0.0
    if stage or job.accumulation == 1:
        return 0.0
    return (4.0 if job.cfg.sharding.grad_reduce_dtype == "fp32" else 2.0) * parameters


def gathered_weights(job: Job) -> float:
    """Whole weights at the end of the loss, and buffers: the root's; one block's, or all blocks' if kept."""
    model, mode = job.model, job.sharding
    if mode.stage == 3:
        return 2 * model.root + ZERO_LIVE + ZERO_BUCKETS
    if job.mode == "ddp" and job.nodes > 1 and job.cfg.sharding.grad_reduce_dtype == "fp32":
        return 4.0 * model.parameters  # the all-reduce in FP32 keeps its buffers until the next backward
    if not job.fsdp:
        return 0.0
    return 2.0 * (model.parameters if mode.gathers_once else model.root + model.block)


def fp8_copies(job: Job) -> float:
    """FP8 copies of all GEMM weights."""
    return costs_of(job.recipe).weight_copies * job.model.gemm_weights * job.fp8_layers


def layer_activations(job: Job) -> float:
    """Activations that one layer keeps for backward.

    BF16: 2 bytes of input D, norm D, q, k, v (Q + 2K), attention Q, residual D, norm D, gate and up 2F, their
    product F. A recipe keeps less, see `core.recipes`. TE's norms of heads (Qwen3) keep their inputs too.
    """
    s, costs = job.model.shape, costs_of(job.recipe)
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    bf16 = 2 * (4 * s.hidden_size + 2 * queries + 2 * keys + 3 * s.ffn_hidden_size)
    if job.cfg.model.use_te and job.model.qk_norm:
        bf16 += 2 * (queries + 2 * keys)
    saved = costs.saved_per_ffn * s.ffn_hidden_size + costs.saved_per_hidden * s.hidden_size
    return job.tokens * (bf16 - saved * job.fp8_layers)


def logits(job: Job) -> float:
    """A chunk of logits, then the head's gradient in BF16, both in addition to that gradient in FP32."""
    if job.cfg.precision.fp8_lm_head:
        return _logits_fp8(job)
    s, head = job.model.shape, job.model.head
    rows = min(job.tokens, LOGITS_CHUNK // (2 * s.vocab_size))
    chunk = 2.0 * rows * s.vocab_size
    hidden = 3 * 2.0 * job.tokens * s.hidden_size  # the last layer's output, its norm and their gradient
    if rows == job.tokens:
        return chunk + 2 * head + hidden
    return 4 * head + max(chunk, 2 * head) + hidden


def _logits_fp8(job: Job) -> float:
    """Both layouts of the head's weight, a chunk of logits with its gradients, and all tokens' transposed.

    Then the head's gradient: in BF16 for one GEMM; for several in FP32, in addition to a chunk of logits.
    """
    s, head = job.model.shape, job.model.head
    tokens = min(job.tokens, TOKENS_OF_A_HEAD_GEMM)
    several = job.tokens > tokens
    rows = min(tokens, max(128, LOGITS_CHUNK // (2 * s.vocab_size) // 128 * 128))
    chunk = (2.0 + 1.0) * rows * s.vocab_size
    gradient = (4.0 if several else 2.0) * head
    kept = 2.0 * head + tokens * s.vocab_size + 4 * 2.0 * job.tokens * s.hidden_size
    return kept + (gradient + chunk if several else max(gradient, chunk))


def host_bytes(job: Job) -> tuple[int, int]:
    """Bytes per parameter that offloading keeps in host memory, and those that a save needs in addition.

    DeepSpeed: FP32 masters, gradients and moments, weights in BF16, gradients in FP32 if several add up; a
    save copies masters and moments. FSDP2: the optimizer's state; a save splits FP32 weights into halves.
    """
    if job.sharding.engine == "deepspeed":
        return 20 + 2 * (job.accumulation > 1), 12
    return job.optimizer.state_bytes, 4


# The instants of a step that compete for the peak


def at_loss(job: Job) -> dict[str, float]:
    """Bytes by part when the loss is computed and backward begins."""
    layer = 2.0 * job.tokens * job.model.shape.hidden_size if job.recompute else layer_activations(job)
    return state(job) | {
        "gradients": accumulated_gradients(job),
        "FP8 weight copies": fp8_copies(job) * job.keeps_fp8_weights,
        "activations": job.model.shape.num_layers * layer,
        "logits and head gradient": logits(job),
        "gathered, communication": gathered_weights(job),
        "fixed": FIXED,
    }


def start_of_backward(job: Job) -> dict[str, float]:
    """Bytes by part in backward of the last layer, when gradients of its weights and activations are new."""
    model, parts, s = job.model, at_loss(job), job.model.shape
    copies = parts["FP8 weight copies"]
    if job.cfg.model.use_te and not job.keeps_fp8_weights:  # cast again, for this layer
        copies = fp8_copies(job) / s.num_layers
    # Gradients of gate, up and product, and two of the hidden size, in BF16.
    activations = parts["activations"] + 2.0 * job.tokens * (3 * s.ffn_hidden_size + 2 * s.hidden_size)
    # The next block's weights, and the send and receive buffers of this one's gradients, in 2 bytes each.
    communication = 6.0 * model.block if job.fsdp else 0.0
    return parts | {
        "gradients": parts["gradients"] + 2.0 * model.block,
        "FP8 weight copies": copies,
        "activations": activations + layer_activations(job) * job.recompute,
        "logits and head gradient": 2.0 * model.head,
        "gathered, communication": parts["gathered, communication"] + communication,
    }


def after_backward(job: Job) -> dict[str, float]:
    """Bytes by part at the end of backward, with one layer's activations left."""
    model, parts, mode = job.model, at_loss(job), job.sharding
    gradients, communication = parts["gradients"], parts["gathered, communication"]
    if job.fsdp:
        # The root's gradients come last: gathered weights, gradients, and 2 bytes each sent and received. All
        # that the blocks gathered or accumulated is sharded or freed by then.
        gradients *= model.root / model.parameters
        gradients += 0.0 if mode.offload else 2.0 * (model.parameters - model.root) / job.shard
        communication = 8.0 * model.root
        if mode.in_groups and job.cfg.sharding.grad_reduce_dtype == "fp32":
            communication += 4.0 * model.parameters / job.shard  # FP32 all-reduce inputs, until backward ends
    elif mode.stage in (1, 2):
        communication = ZERO_BUCKETS
        gradients = max(gradients, 2.0 * model.parameters / job.gpus)
    elif not mode.stage:
        gradients = max(gradients, 2.0 * model.parameters)
    cached = 1.0 if job.caches_fp8_weights else 1 / model.shape.num_layers
    return parts | {
        "gradients": gradients,
        "FP8 weight copies": parts["FP8 weight copies"] * cached,
        "activations": 0.0 if job.fsdp else layer_activations(job),
        "logits and head gradient": 0.0,
        "gathered, communication": communication,
    }


def at_step(job: Job) -> dict[str, float]:
    """Bytes by part when ZeRO 1 or 2 steps: its gradients, and the same in FP32."""
    parts = after_backward(job)
    copies = 0.0 if job.zero_sums_whole else 4.0 * job.model.parameters / job.gpus
    gradients = parts["gradients"] + copies
    return parts | {"gradients": gradients, "activations": 0.0, "gathered, communication": 0.0}


def peak(job: Job) -> dict[str, float]:
    """Bytes by part at the instant with the largest sum."""
    instants = [at_loss, start_of_backward, after_backward]
    instants += [at_step] if job.sharding.stage in (1, 2) else []
    return max((instant(job) for instant in instants), key=lambda parts: sum(parts.values()))


# Decisions from the state only, since an unknown architecture's activations cannot be counted

# From here on sharding the optimizer's work saves more than gathering weights costs (docs/multi_gpu.md).
LARGE = 2 * 10**9
ROOM = 0.6  # share of a GPU's memory for the state; the rest is for activations, FP8 copies and NCCL
LAST_ROOM = 0.75  # before all goes to the CPU, the slowest mode; --gradient_checkpointing fits in the rest
ROOM_ON_ONE_GPU = 0.9  # where sharding cannot help: an 8B needs 80 % of an H200 and trains


def state_bytes(job: Job) -> float:
    """Weights, gradients and optimizer state, with whatever accumulates or stays gathered."""
    whole = job.model.parameters * job.optimizer.state_bytes
    held = whole / job.shard + (accumulated_gradients(job) if job.fsdp else 0)
    if job.sharding.gathers_once:  # whole gradients too, until they are reduced
        held += 2 * job.model.parameters * (4 if job.cfg.precision.mixed_precision == "fp32" else 2)
    return held


def choose_mode(job: Job, gpu: int | None) -> tuple[str, str]:
    """Return the fastest mode that fits a GPU of `gpu` bytes (None without one), and the reason."""
    if gpu is None:
        return "ddp", "without a GPU there is no memory to plan for"
    modes = ("ddp", "fsdp_grad", "hsdp", "fsdp_full")
    held = {mode: state_bytes(replace(job, mode=mode)) for mode in modes}
    whole, room, last = held["ddp"], ROOM * gpu, LAST_ROOM * gpu
    if job.gpus == 1 and whole <= ROOM_ON_ONE_GPU * gpu:
        return "single", "one GPU, nothing to shard"
    why = f"weights, gradients and optimizer need {whole / 1e9:.1f} GB, a GPU has {room / 1e9:.1f}"
    if accumulated := accumulated_gradients(replace(job, mode="fsdp_full")):
        why += f", accumulated gradients {accumulated / 1e9:.1f} GB"
    if whole <= room and job.model.parameters < LARGE:
        return "ddp", why
    if held["fsdp_grad"] <= room:
        return "fsdp_grad", f"{why}; a shard fits together with gathered weights and gradients"
    if whole <= room:
        return "ddp", why
    if job.nodes > 1 and job.gpus_per_node > 1 and held["hsdp"] <= room:
        return "hsdp", f"{why}; sharded over the {job.gpus_per_node} ranks of a node they fit"
    if held["fsdp_full"] <= last:
        limit = "" if held["fsdp_full"] <= room else f" into {last / 1e9:.1f} GB"
        return "fsdp_full", f"{why}; sharded over {job.gpus} ranks they fit{limit}"
    return "fsdp_offload", f"{why}; sharded over {job.gpus} ranks they do not fit into {last / 1e9:.1f} GB"
