"""GPU memory of a training step, computed from tensor sizes, for the choices of `auto` and `benchmarks.plan`.

Sizes are bytes on one GPU. 1 GB is 10^9 bytes, as in summary.json.
"""

from __future__ import annotations

from dataclasses import replace

from fp8_suite.core.machine import host_memory
from fp8_suite.core.recipes import costs_of
from fp8_suite.te_models.settings import CHUNK_BYTES, TOKENS_PER_GEMM
from fp8_suite.training.estimate.activations import (
    backward_buffers,
    between_stages,
    host_activations,
    kept_activations,
    layer_activations,
    stored_activations,
)
from fp8_suite.training.estimate.setup import TrainingSetup, rank_setups

# Workspaces of cuBLAS and TE, RoPE angles and the batch: what recorded runs use beyond the counted tensors.
FIXED = 0.1e9
# From ds_configs/zero3.json: up to 1e9 gathered BF16 parameters (stage3_max_live_parameters).
ZERO_LIVE = 2 * 1e9
# Two buckets (overlap_comm) of 2e8 BF16 gradients each (reduce_bucket_size).
ZERO_BUCKETS = 2 * 2 * 2e8
# Host memory of a rank for libraries, data and buffers, beside what it offloads (assumed), but at most a
# quarter of the host's, so that small models run on small machines.
HOST_RESERVED, RESERVED_SHARE = 4e9, 0.25


# Terms of the sum


def state(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes of weights, master weights and moments between steps."""
    if setup.mode_spec.offload:
        return {"weights": 0.0, "master weights": 0.0, "moments": 0.0}
    optimizer, model = setup.optimizer, setup.model
    trained = model.trained / setup.shards
    itemsize = optimizer.parameter_dtype.itemsize
    weights = itemsize * model.parameters
    if optimizer.holds_fp8_weights:  # in place of BF16 weights that are frozen or offloaded, else in addition
        weights += model.gemm_weights * (-1 if optimizer.offload or model.adapters else 1)
    weights /= 1 if setup.mode_spec.stage in (1, 2) else setup.shards
    weights += itemsize * model.adapters / setup.shards
    masters, moments = optimizer.master_bytes * trained, optimizer.moment_bytes * trained
    if optimizer.offload:  # its buffers exist only in the step, when the memory of activations is free
        masters = moments = 0.0
    return {"weights": weights, "master weights": masters, "moments": moments}


def resident_state(setup: TrainingSetup) -> float:
    """Return the bytes of a GPU's part of weights, gradients, master weights and moments."""
    return max(map(_resident_state, rank_setups(setup)))


def _resident_state(setup: TrainingSetup) -> float:
    if setup.mode_spec.offload:
        return 0.0
    gradients = setup.optimizer.parameter_dtype.itemsize * setup.model.trained
    unsharded = replace(setup, mode="single")
    return (sum(state(unsharded).values()) + gradients) / setup.shards


def accumulated_gradients(setup: TrainingSetup) -> float:
    """Return the bytes of gradients kept between micro-batches.

    ZeRO 3's gradients and DDP's buckets are also kept between steps.
    """
    parameters, stage = setup.model.trained, setup.mode_spec.stage
    if setup.mode_spec.engine == "ddp" and not setup.exchanges_sums:
        return 2.0 * parameters
    if stage and not setup.mode_spec.offload:
        if setup.accumulates_in_zero1:
            return 4.0 * parameters
        if setup.accumulation > 1:
            return 4.0 * parameters / setup.gpus
        return 2.0 * parameters / setup.gpus if stage == 3 else 0.0
    if stage or setup.accumulation == 1:
        return 0.0
    return (4.0 if setup.cfg.sharding.grad_reduce_dtype == "fp32" else 2.0) * parameters


def gathered_weights(setup: TrainingSetup) -> float:
    """Return the bytes of gathered weights and communication buffers when backward begins."""
    model, spec = setup.model, setup.mode_spec
    if spec.stage == 3:
        return 2 * model.root_weights + ZERO_LIVE + ZERO_BUCKETS
    ddp = spec.engine == "ddp"
    if ddp and setup.reduces_in_fp32 and not setup.exchanges_sums:
        return 4.0 * model.trained  # buffers of the FP32 all-reduce, until the next backward
    if not setup.fsdp:
        return fp8_exchange(setup) * model.gradients(model.head_weights) if ddp else 0.0
    last = model.block_weights if setup.gpus > 1 else 0  # one rank keeps no buffer of the last gather
    return 2.0 * ((model.parameters if spec.gathers_once else model.root_weights) + last)


def fp8_exchange(setup: TrainingSetup) -> float:
    """Return the bytes per gradient that an exchange in FP8 takes beside its BF16 input; 0 without one.

    It sends and receives a byte. PyTorch's functions also decode and sum 1/N in FP32 (8.0 bytes on 2 ranks
    and 3.5 on 8, by its profiler); kernels need less, which no run has measured. DDP exchanges the gradient
    of the LM head as one bucket.
    """
    if setup.cfg.sharding.grad_reduce_dtype != "fp8":
        return 0.0
    return max(3.5, 2.0 + 12.0 / (setup.shards if setup.fsdp else setup.gpus))


def fp8_copies(setup: TrainingSetup) -> float:
    """Return the bytes of FP8 copies of all GEMM weights; of weights in FP8, those are their transposes."""
    copies = 1.0 if setup.optimizer.holds_fp8_weights else costs_of(setup.recipe).weight_copies
    return copies * setup.model.gemm_weights * setup.fp8_layer_share


def loss_peak(setup: TrainingSetup) -> float:
    """Return the peak bytes of the loss: a chunk of logits, the LM head's gradient, and hidden states.

    With several chunks the gradient accumulates in FP32; its BF16 copy exists after the last chunk is freed.
    """
    if not setup.has_head:
        return 0.0
    if setup.cfg.precision.fp8_lm_head:
        return _loss_peak_fp8(setup)
    s, head = setup.model.shape, setup.model.gradients(setup.model.head_weights)
    rows = min(setup.tokens, CHUNK_BYTES // (2 * s.vocab_size))
    chunk = 2.0 * rows * s.vocab_size
    hidden = 3 * 2.0 * setup.tokens * s.hidden_size  # output of the last layer, its norm, and their gradient
    if rows == setup.tokens:
        return chunk + 2 * head + hidden
    return 4 * head + max(chunk, 2 * head) + hidden


def _loss_peak_fp8(setup: TrainingSetup) -> float:
    """Return the peak bytes of the loss with an FP8 LM head.

    Kept throughout: both FP8 layouts of the head's weight, the transposed FP8 gradients of one GEMM's logits,
    and hidden states. In addition: a chunk of logits with its FP8 gradient, and the head's gradient. With one
    GEMM the head's gradient is BF16 and follows the chunk; with several it is FP32 and exists beside it.
    """
    s, head = setup.model.shape, setup.model.head_weights
    tokens = min(setup.tokens, TOKENS_PER_GEMM)
    several = setup.tokens > tokens
    rows = min(tokens, max(128, CHUNK_BYTES // (2 * s.vocab_size) // 128 * 128))
    chunk = (2.0 + 1.0) * rows * s.vocab_size
    gradient = (4.0 if several else 2.0) * head
    kept = 2.0 * head + tokens * s.vocab_size + 4 * 2.0 * setup.tokens * s.hidden_size
    return kept + (gradient + chunk if several else max(gradient, chunk))


def offloaded_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of host memory per node that offloaded state and activations need.

    --offload_optimizer keeps masters and moments (of FP8 weights also BF16 weights), once for every copy of
    the model's state over all nodes. DeepSpeed keeps FP32 masters, gradients and moments, and BF16 weights
    and gradients; with accumulation the latter are FP32 too. A save of these copies masters and moments.
    """
    per_parameter = setup.offloaded_state * setup.gpus / setup.shards
    if setup.mode_spec.offload:
        per_parameter = 20 + 2 * (setup.accumulation > 1) + 12 * setup.cfg.checkpoint.save_checkpoints
    return per_parameter * setup.model.trained / setup.nodes + host_activations(setup)


def host_capacity(setup: TrainingSetup) -> float:
    """Return the bytes of this node's memory for offloaded state and activations."""
    total = host_memory()
    return total - min(HOST_RESERVED * min(setup.gpus, setup.gpus_per_node), RESERVED_SHARE * total)


def checkpoint_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of a checkpoint: BF16 weights, 16-bit remainders of their masters, and moments."""
    optimizer = setup.optimizer
    return (2 + 2 * optimizer.master_weights + optimizer.moment_bytes) * setup.model.trained


def staging_bytes(setup: TrainingSetup, *, copies_host: bool) -> float:
    """Return the bytes of host memory per node that a save in the background needs for copies of the state.

    Without `copies_host`, state that is offloaded to host memory is not copied.
    """
    offloaded = 0.0 if copies_host else setup.offloaded_state * setup.model.trained
    return (checkpoint_bytes(setup) - offloaded) / setup.nodes


# Points in a step where memory may peak


def at_loss(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part when the loss is computed, before backward."""
    copies = fp8_copies(setup) * setup.keeps_fp8_weights * setup.share_of("none")
    if setup.cfg.precision.fp8_weights and setup.cfg.log.fp8_stats_interval:
        copies = fp8_copies(setup)  # in steps with statistics, TE transposes FP8 weights already in forward
    return state(setup) | {
        "gradients": accumulated_gradients(setup),
        "FP8 weight copies": copies,
        "activations": stored_activations(setup) * setup.in_flight,
        "between pipeline stages": between_stages(setup),
        "logits and head gradient": loss_peak(setup),
        "gathered, communication": gathered_weights(setup),
        "fixed": FIXED,
    }


def start_of_backward(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part at the start of backward, in the MLP of the last layer or of the one before.

    The last layer has all activations and no gradients yet. The layer before has the buffers of the last
    layer's reduction in place of its activations.
    """
    model, parts, s = setup.model, at_loss(setup), setup.model.shape
    copies, last = parts["FP8 weight copies"], setup.recompute[-1]
    if setup.cfg.model.use_te and (last != "none" or not setup.keeps_fp8_weights):
        copies += fp8_copies(setup) / s.num_layers  # TE casts this layer's weights again
    activations = parts["activations"] + backward_buffers(setup)
    activations += layer_activations(setup) - kept_activations(setup, last)
    if last != "none" and setup.cfg.model.use_te:
        activations -= 2.0 * setup.tokens * setup.hidden  # by recorded runs with 32,768 to 131,072 tokens
    # A fused sum takes the head's gradient at once; autograd adds that of a tied embedding first.
    waits = model.tied and setup.layout.pp == 1
    has_head_gradient = setup.has_head and (setup.fsdp or not setup.fuses_gradient_sums or waits)
    # The next block's gathered weights (with one rank: this block's) and the buffers of gradients.
    communication = 2.0 * model.block_weights + _reduction_buffers(setup) if setup.fsdp else 0.0
    if setup.mode_spec.stage in (1, 2):
        communication = ZERO_BUCKETS  # DeepSpeed allocates them at the first gradient
    return parts | {
        "FP8 weight copies": copies,
        "activations": activations,
        "logits and head gradient": 2.0 * model.gradients(model.head_weights) * has_head_gradient,
        "gathered, communication": parts["gathered, communication"] + communication,
    }


def _reduction_buffers(setup: TrainingSetup) -> float:
    """Return the bytes by which FSDP2's reduction of the last block adds to the start of backward.

    These are its send buffer and, unless summed before, its sharded gradient. The block's activations are
    free by then, in a pipeline also those of the other micro-batches in flight.
    """
    gradients = setup.model.gradients(setup.model.block_weights)
    freed = kept_activations(setup, setup.recompute[-1]) + (setup.in_flight - 1) * stored_activations(setup)
    buffers = 2.0
    if setup.accumulation == 1:
        buffers = (4.0 if setup.reduces_in_fp32 else 2.0) + 2.0 / setup.shards
    return max(0.0, buffers * gradients - freed)


def end_of_backward(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part in backward of the first layer, when all gradients but the embedding's exist.

    Memory peaks here if the other layers' activations were not on the GPU. Under FSDP2 the other blocks'
    gradients are sharded, one send buffer is left, and no further block is gathered.
    """
    model, parts, fsdp = setup.model, start_of_backward(setup), setup.fsdp
    block = model.gradients(model.block_weights)
    sharded = (model.trained - model.gradients(model.root_weights) - block) / setup.shards
    one_layer = fp8_copies(setup) / model.shape.num_layers
    copies = parts["FP8 weight copies"]
    stored = stored_activations(setup) - kept_activations(setup, setup.recompute[-1])
    communication = gathered_weights(setup) + 2.0 * block * fsdp + _replica_sums(setup, sharded)
    return parts | {
        "gradients": max(parts["gradients"], 2.0 * (sharded + block * (not fsdp))),
        "FP8 weight copies": copies if fsdp else max(copies * setup.caches_fp8_weights, one_layer),
        "activations": parts["activations"] - stored,
        "gathered, communication": communication,
    }


def _replica_sums(setup: TrainingSetup, gradients: float) -> float:
    """Return the bytes of inputs of hsdp's FP32 all-reduce between replicas, which live until backward ends.

    `gradients` is the number of a rank's reduced gradients.
    """
    in_fp32 = setup.cfg.sharding.grad_reduce_dtype == "fp32"
    return 4.0 * gradients if setup.mode_spec.in_groups and in_fp32 else 0.0


def after_backward(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part at the end of backward, with the first layer's activations left."""
    model, parts, spec = setup.model, at_loss(setup), setup.mode_spec
    gradients, communication = parts["gradients"], parts["gathered, communication"]
    if setup.fsdp:
        # The root's gradients are reduced last: its gathered weights, gradients, send and receive buffers are
        # BF16. NCCL's reduce-scatter (bf16) receives a shard, an exchange (fp32) all shards. The blocks'
        # weights and gradients are sharded again by then.
        gradients *= model.gradients(model.root_weights) / model.trained
        gradients += 2.0 * (model.trained - model.gradients(model.root_weights)) / setup.shards
        communication = 2.0 * model.root_weights
        received = 2.0 / (setup.shards if setup.cfg.sharding.grad_reduce_dtype == "bf16" else 1)
        communication += max(4.0 + received, 2.0 + fp8_exchange(setup)) * model.gradients(model.root_weights)
        communication += _replica_sums(setup, model.trained / setup.shards)
    elif spec.stage in (1, 2):
        communication = ZERO_BUCKETS
        gradients = max(gradients, 2.0 * model.parameters / setup.gpus)
    elif not spec.stage:
        gradients = max(gradients, 2.0 * model.trained)
    one_layer = 0.0 if setup.fsdp else fp8_copies(setup) / model.shape.num_layers
    return parts | {
        "gradients": gradients,
        "FP8 weight copies": max(parts["FP8 weight copies"] * setup.caches_fp8_weights, one_layer),
        "activations": 0.0 if setup.fsdp else layer_activations(setup),
        "logits and head gradient": 0.0,
        "gathered, communication": communication,
    }


def at_step(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part in the optimizer step of ZeRO 1 or 2, which copies its gradients to FP32.

    Derived from DeepSpeed's code: no recorded run has its peak here.
    """
    parts = after_backward(setup)
    copies = 0.0 if setup.accumulates_in_zero1 else 4.0 * setup.model.parameters / setup.gpus
    gradients = parts["gradients"] + copies
    return parts | {"gradients": gradients, "activations": 0.0, "gathered, communication": 0.0}


def peak(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes by part at the point of the step with the largest sum, on the rank that needs most."""
    return max(map(_peak, rank_setups(setup)), key=lambda parts: sum(parts.values()))


def _peak(setup: TrainingSetup) -> dict[str, float]:
    points = [at_loss, start_of_backward, after_backward]
    points += [at_step] if setup.mode_spec.stage in (1, 2) else []
    points += [] if setup.mode_spec.stage else [end_of_backward]
    return max((point(setup) for point in points), key=lambda parts: sum(parts.values()))


def peak_with_caches(setup: TrainingSetup) -> float:
    """Return the peak bytes with what torch caches for FSDP2's own streams, on the rank that needs most.

    Those streams allocate sharded gradients, buffers of the exchange and gathered weights. Once freed, other
    streams get that memory only by a flush of the cache, for which the GPU waits. The largest buffers are the
    root's: received BF16 gradients, their FP32 sums, and gathered weights.
    """
    return max(map(_peak_with_caches, rank_setups(setup)))


def _peak_with_caches(setup: TrainingSetup) -> float:
    if not setup.caches_by_stream:
        return sum(_peak(setup).values())
    model = setup.model
    gradients = 2.0 * model.trained / setup.shards
    exchange = (2.0 + 4.0 / setup.shards) * model.gradients(model.root_weights)
    beside = {
        at_loss: gradients + exchange,
        start_of_backward: gradients + exchange,
        end_of_backward: exchange,
        after_backward: 0.0,
    }
    peaks = (sum(point(setup).values()) + cached for point, cached in beside.items())
    return 2.0 * model.root_weights + max(peaks)
