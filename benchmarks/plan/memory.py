"""Peak memory of one GPU in a training step, counted tensor by tensor.

T tokens of a micro-batch, D hidden size, Q all query heads' width, K that of keys, F feed-forward size, V
vocabulary. Moments compete for the peak: the end of the loss, when every layer's activations wait for
backward; the start of backward; its end, when all gradients are there; and ZeRO's step. GB are 10^9 bytes, as
in summary.json.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.plan.job import Job
from core.recipes import costs_of

LOGITS_CHUNK = 2**30  # te_models/loss.py, CHUNK_BYTES
TOKENS_OF_A_HEAD_GEMM = 8192  # te_models/loss_fp8.py, TOKENS_OF_A_GEMM
# Workspaces of cuBLAS and TE, RoPE angles, the batch: what was left in all recorded runs after counting.
FIXED = 0.1e9
# ZeRO 3 keeps up to 1e9 gathered parameters (stage3_max_live_parameters) and two buckets of 2e8 gradients
# (reduce_bucket_size, twice with overlap_comm): ds_configs/zero3.json. ZeRO 1 and 2 have buckets in backward
# alone, and an FP32 copy of their gradients when they step: by its code, no recorded run has its peak there.
ZERO_LIVE, ZERO_BUCKETS = 2 * 1e9, 2 * 2 * 2e8


def layer_bytes(job: Job) -> float:
    """What one layer keeps for backward: its input, norms, q, k, v, attention, residual and MLP, in bytes.

    BF16: 2 bytes of input D, norm D, q, k, v (Q + 2K), attention Q, residual D, norm D, gate and up 2F, their
    product F; a recipe keeps less, see `core.recipes`. TE's norms of heads (Qwen3) keep q, k, v as they were.
    """
    s, costs = job.model.shape, costs_of(job.recipe)
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    bf16 = 2 * (4 * s.hidden_size + 2 * queries + 2 * keys + 3 * s.ffn_hidden_size)
    if job.use_te and job.model.family.qk_norm:
        bf16 += 2 * (queries + 2 * keys)
    fewer = costs.saved_per_ffn * s.ffn_hidden_size + costs.saved_per_hidden * s.hidden_size
    return job.tokens * (bf16 - fewer * job.fp8_layers)


def host_bytes(job: Job) -> tuple[int, int]:
    """Bytes a parameter that offloading keeps on the hosts, and that a save takes beside them.

    As training counts them: `host_bytes` of `training.parallel.strategies` and `training.parallel.zero`.
    """
    if job.zero:
        return 20 + 2 * (job.accumulation > 1), 12
    return 2 * (4 if job.masters else 2) + 2 * job.moment_bytes, 4


def _state(job: Job) -> dict[str, float]:
    """Weights, masters and moments on this GPU; ZeRO keeps FP32 masters beside BF16 weights."""
    parameters, shard = job.model.parameters, job.shard
    if job.offload:
        return {"weights": 0.0, "master weights": 0.0, "moments": 0.0}
    weights = 2 * parameters / (1 if job.zero in (1, 2) else shard)
    masters = (4 if job.zero else 2 * job.masters) * parameters / shard
    moments = 2 * job.moment_bytes * parameters / shard
    if job.fp8_all_gather and job.use_te:  # FP8 weights beside whole masters: 1 + 4 instead of 2 + 2 bytes
        weights -= job.model.gemm_weights / shard
        masters += 2 * job.model.gemm_weights / shard
    return {"weights": weights, "master weights": masters, "moments": moments}


def _gathered(job: Job) -> float:
    """Whole weights at the end of the loss: the root's; of blocks one, or all where they are kept."""
    model = job.model
    if job.zero == 3:
        return 2 * model.root + ZERO_LIVE + ZERO_BUCKETS
    if job.zero:
        return 0.0
    if job.mode == "ddp" and job.nodes > 1 and job.grad_fp32:
        # Sums in FP32, which DDP keeps until the next backward: 1b-4gpu-ddp-fp32-traffic has 4.5 GB of 4.9.
        return 4.0 * model.parameters
    if not job.sharded:
        return 0.0
    return 2.0 * (model.parameters if job.mode == "fsdp_grad" else model.root + model.block)


def _logits(job: Job) -> float:
    """A chunk of logits, then the head's gradient in BF16, beside that gradient in FP32."""
    if job.fp8_head:
        return _logits_fp8(job)
    s = job.model.shape
    rows = min(job.tokens, LOGITS_CHUNK // (2 * s.vocab_size))
    chunk = 2.0 * rows * s.vocab_size
    hidden = 3 * 2.0 * job.tokens * s.hidden_size  # the last layer's output, its norm and their gradient
    if rows == job.tokens:
        return chunk + 2 * job.model.head + hidden
    if job.two_chunks:
        second = 2.0 * min(rows, job.tokens - rows) * s.vocab_size
        return 4 * job.model.head + max(chunk + second, chunk + 2 * job.model.head) + hidden
    return 4 * job.model.head + max(chunk, 2 * job.model.head) + hidden


def _logits_fp8(job: Job) -> float:
    """Both layouts of the head's weight, a chunk of logits with its gradients, and all tokens' transposed.

    Then the head's gradient: in BF16 of one GEMM, in FP32 of several, which a chunk's logits stand beside.
    """
    s = job.model.shape
    of_a_gemm = min(job.tokens, TOKENS_OF_A_HEAD_GEMM)
    several = job.tokens > of_a_gemm
    rows = min(of_a_gemm, max(128, LOGITS_CHUNK // (2 * s.vocab_size) // 128 * 128))
    chunk = (2.0 + 1.0) * rows * s.vocab_size
    gradient = (4.0 if several else 2.0) * job.model.head
    kept = 2.0 * job.model.head + of_a_gemm * s.vocab_size + 4 * 2.0 * job.tokens * s.hidden_size
    return kept + (gradient + chunk if several else max(gradient, chunk))


def _sums_whole(job: Job) -> bool:
    """ZeRO 1 under accumulation is another class of DeepSpeed's, which adds up whole gradients in FP32."""
    return job.zero == 1 and job.accumulation > 1


def _kept_by_zero(job: Job) -> float:
    """Gradients from one backward to the next; ZeRO 1 and 2 free a single micro-batch's after the step."""
    if _sums_whole(job):
        return 4.0 * job.model.parameters
    if job.accumulation > 1:
        return 4.0 * job.model.parameters / job.gpus
    return 2.0 * job.model.parameters / job.gpus if job.zero == 3 else 0.0


def at_loss(job: Job) -> dict[str, float]:
    """Bytes by part when the loss is computed and backward begins."""
    model, layers = job.model, job.model.shape.num_layers
    gradients = 0.0
    if job.mode == "ddp":
        gradients = 2 * model.parameters  # buckets live as long as the job
    elif job.zero and not job.offload:
        gradients = _kept_by_zero(job)
    elif job.accumulation > 1:
        gradients = (4 if job.grad_fp32 else 2) * model.parameters
    activations = 2.0 * job.tokens * model.shape.hidden_size if job.recompute else layer_bytes(job)
    copies = costs_of(job.recipe).weight_copies * model.gemm_weights * job.fp8_layers * job.two_layouts
    return _state(job) | {
        "gradients": gradients,
        "FP8 weight copies": copies,
        "activations": layers * activations,
        "logits and head gradient": _logits(job),
        "gathered, communication": _gathered(job),
        "fixed": FIXED,
    }


def after_backward(job: Job) -> dict[str, float]:
    """Bytes by part at the end of backward, one layer's activations still there."""
    model, parts = job.model, at_loss(job)
    gradients, communication = parts["gradients"], parts["gathered, communication"]
    if job.sharded:
        # The root's gradients come last: gathered weights, gradients, and 2 bytes each sent and received. Of
        # the blocks' nothing is left whole, also of what several micro-batches added up.
        gradients *= model.root / model.parameters
        gradients += 0.0 if job.offload else 2.0 * (model.parameters - model.root) / job.shard
        communication = 8.0 * model.root
        if job.mode == "hsdp" and job.grad_fp32:
            # FSDP2 keeps what copies of the model sum up, in FP32, until all of backward is over.
            communication += 4.0 * model.parameters / job.shard
    elif job.zero in (1, 2):
        communication = ZERO_BUCKETS
        gradients = max(gradients, 2.0 * model.parameters / job.gpus)
    elif not job.zero:
        gradients = max(gradients, 2.0 * model.parameters)
    layers_cast = model.shape.num_layers if job.keeps_fp8_weights else 1
    return parts | {
        "gradients": gradients,
        "FP8 weight copies": parts["FP8 weight copies"] * layers_cast / model.shape.num_layers,
        "activations": 0.0 if job.sharded else layer_bytes(job),
        "logits and head gradient": 0.0,
        "gathered, communication": communication,
    }


def start_of_backward(job: Job) -> dict[str, float]:
    """Bytes by part when the last layer goes backward: gradients of its weights and activations are new."""
    model, parts, s = job.model, at_loss(job), job.model.shape
    copies = parts["FP8 weight copies"]
    if job.use_te and not job.two_layouts:  # made again, for this layer
        copies = costs_of(job.recipe).weight_copies * model.gemm_weights / s.num_layers * job.fp8_layers
    # Gradients of gate, up and product, and two of the hidden size, in BF16.
    activations = parts["activations"] + 2.0 * job.tokens * (3 * s.ffn_hidden_size + 2 * s.hidden_size)
    # The next block's weights, and what is sent and received of this one's gradients, in 2 bytes each.
    communication = 6.0 * model.block if job.sharded else 0.0
    return parts | {
        "gradients": parts["gradients"] + 2.0 * model.block,
        "FP8 weight copies": copies,
        "activations": activations + layer_bytes(job) * job.recompute,
        "logits and head gradient": 2.0 * model.head,
        "gathered, communication": parts["gathered, communication"] + communication,
    }


def at_step(job: Job) -> dict[str, float]:
    """Bytes by part when ZeRO 1 or 2 steps: its gradients, and the same in FP32."""
    parts = after_backward(job)
    gradients = parts["gradients"] + 4.0 * job.model.parameters / job.gpus * (not _sums_whole(job))
    return parts | {"gradients": gradients, "activations": 0.0, "gathered, communication": 0.0}


def peak(job: Job) -> dict[str, float]:
    """Bytes by part at the moment when they are most."""
    moments = [at_loss(job), start_of_backward(job), after_backward(job)]
    moments += [at_step(job)] if job.zero in (1, 2) else []
    return max(moments, key=lambda parts: sum(parts.values()))


def largest_batch(job: Job, room: float) -> int:
    """The largest micro-batch whose peak is at most `room` bytes; 0 if not one sequence fits."""

    def fits(batch: int) -> bool:
        return sum(peak(replace(job, batch=batch)).values()) <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**20:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
