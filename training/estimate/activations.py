"""Bytes of activations in a training step, and the work of recomputing them, for `memory` and the planner.

Sizes are bytes on one GPU.
"""

from __future__ import annotations

from fp8_suite.core.recipes import costs_of
from fp8_suite.te_models.settings import IN_FLIGHT, KEPT
from fp8_suite.te_models.shape import attention_flops
from fp8_suite.training.estimate.setup import TrainingSetup, rank_setups

# FLOPs that a GPU computes while it moves a byte: of an H100, 989 TFLOP/s and 3.35 TB/s.
FLOPS_PER_BYTE = 300


def layer_activations(setup: TrainingSetup) -> float:
    """Return the bytes of activations that one layer saves for backward.

    In BF16 these are, per token: input, attention norm, residual and MLP norm (hidden size each); queries and
    attention output (width of the query heads); keys and values (width of the key heads); gate, up and their
    product (MLP width). FP8 recipes store less (`core.recipes`). TE's QK norms (Qwen3) add theirs.
    """
    s, costs = setup.model.shape, costs_of(setup.recipe)
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    hidden = setup.hidden
    inputs = 2 * hidden + s.ffn_hidden_size  # of GEMMs alone: outputs of norms, product of the MLP
    if setup.model.adapters:
        inputs = _adapter_inputs(setup)
    bf16 = 2 * (2 * hidden + 2 * queries + 2 * keys + 2 * s.ffn_hidden_size + inputs)
    if setup.cfg.model.use_te and setup.model.qk_norm:
        bf16 += 2 * (queries + 2 * keys)
    # Without a gather TE keeps both layouts of the MLP norm's output, 1 byte each.
    hidden_saved = costs.hidden_bytes_saved + setup.gathers_rows
    less = costs.ffn_bytes_saved * s.ffn_hidden_size + hidden_saved * hidden
    less = 0.0 if setup.model.adapters else less * setup.fp8_layer_share
    return setup.tokens * (bf16 - less)


def _adapter_inputs(setup: TrainingSetup) -> float:
    """Return the values per token that a layer saves for its adapters, in BF16.

    GEMMs with frozen weights save no input; adapters do, and their products with A. Dropout saves a masked
    copy and its mask instead. Attention saves its output, the second input, by itself. TE's layers compute
    SwiGLU's result again (`te_models.lora.inputs`).
    """
    cfg, drops = setup.cfg, setup.cfg.lora.lora_dropout > 0
    qkv, output, gate_up, down = (share * width for share, width, _ in setup.adapted_gemms)
    inner = cfg.lora.lora_rank * sum(setup.model.adapted.values()) / setup.model.shape.num_layers
    inputs = (1 + drops) * (qkv + gate_up) + 2 * drops * output + inner
    return inputs + (2 * drops if cfg.model.use_te else 1 + drops) * down


def _kept_widths(setup: TrainingSetup, level: str) -> list[float]:
    """Return the values per token of each BF16 tensor that a layer recomputed at `level` keeps.

    TE layers: see `te_models.recompute.layers`. Hugging Face layers keep their input, and so do all layers
    under ZeRO 3.
    """
    s = setup.model.shape
    queries, keys, hidden = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, setup.hidden
    # In a ring, attention has a result for each rank's keys.
    results = setup.layout.cp if setup.comm_type in ("p2p", "a2a+p2p") else 1
    widths = {"qkv": queries + 2 * keys, "attention": results * queries, "output": hidden}
    widths["gate_up"] = 2 * s.ffn_hidden_size
    keeps_results = setup.cfg.model.use_te and setup.mode_spec.stage != 3
    return [hidden, *(widths[name] for name in KEPT[level] if keeps_results)]


def kept_activations(setup: TrainingSetup, level: str) -> float:
    """Return the bytes of activations that a layer recomputed at `level` keeps from forward to backward."""
    if level == "none":
        return layer_activations(setup)
    if level == "mlp" and not setup.cfg.model.use_te:  # all but the inside of the MLP
        per_ffn = 6.0 - costs_of(setup.recipe).ffn_bytes_saved * setup.fp8_layer_share
        if setup.model.adapters:
            per_ffn = 4.0 + 2.0 * setup.adapted_gemms[-1][0]
        return layer_activations(setup) - setup.tokens * per_ffn * setup.model.shape.ffn_hidden_size
    return setup.tokens * 2.0 * sum(_kept_widths(setup, level))


def recomputed_weights(setup: TrainingSetup) -> float:
    """Return the number of GEMM weights, of all layers, that are multiplied again in backward."""
    s = setup.model.shape
    layer, down = setup.model.gemm_weights / s.num_layers, s.hidden_size * s.ffn_hidden_size
    if setup.cfg.model.use_te:
        again = {"none": 0.0, "cheap": 0.0, "mlp": 2.0 * down}
        deep = layer - down  # kernels do not run again if backward does not need their result
    else:
        again, deep = {"none": 0.0, "mlp": 3.0 * down}, layer
    return sum(again.get(level, deep) for level in setup.recompute)


def recomputed_attention(setup: TrainingSetup) -> float:
    """Return the fraction of layers whose attention runs again in backward."""
    keeps_result = setup.cfg.model.use_te and setup.mode_spec.stage != 3
    return setup.share_of("full") if keeps_result else setup.share_of("full", "layer")


def recomputation_flops(setup: TrainingSetup) -> float:
    """Return the FLOPs of recomputation in backward, with elementwise operations counted by their bytes."""
    s = setup.model.shape
    attention = attention_flops(s, setup.tokens * setup.cfg.data.max_seq_length) / 3  # its forward pass
    moved = 2.0 * setup.tokens * (10 * setup.hidden + 3 * s.ffn_hidden_size)  # norms, residuals, SwiGLU
    layers = s.num_layers * (1 - setup.share_of("none"))
    flops = 2.0 * setup.tokens * recomputed_weights(setup) + recomputed_attention(setup) * attention
    return flops + FLOPS_PER_BYTE * moved * layers


def backward_buffers(setup: TrainingSetup) -> float:
    """Return the bytes of temporary tensors in a layer's backward.

    The MLP has BF16 gradients of gate, up and product, and two of the hidden size. Attention has keys, values
    and their gradients of whole sequences, if ranks gather them.
    """
    s, gathers = setup.model.shape, setup.comm_type == "all_gather"
    gathered = 4 * s.num_kv_heads * s.head_dim * setup.layout.cp * gathers
    return 2.0 * setup.tokens * max(3 * s.ffn_hidden_size + 2 * s.hidden_size, gathered)


def host_activations(setup: TrainingSetup) -> float:
    """Return the bytes of host memory per node that --offload_activations takes.

    Each tensor has a buffer of pinned memory, which PyTorch allocates in powers of two. Without packing,
    shorter micro-batches use smaller buffers: up to as many bytes again.
    """
    if not setup.cfg.model.offload_activations:
        return 0.0
    rank = rank_setups(setup)[0]
    layers = (_kept_widths(rank, level) for level in rank.recompute if level != "none")
    sizes = (int(2 * setup.tokens * width) for widths in layers for width in widths)
    longest = sum(1 << (size - 1).bit_length() for size in sizes)
    return (1 if setup.cfg.data.packing else 2) * longest * setup.gpus / setup.nodes


def stored_activations(setup: TrainingSetup) -> float:
    """Return the bytes of activations on the GPU when backward begins."""
    levels = setup.recompute
    sizes = {level: kept_activations(setup, level) for level in set(levels)}
    kept = [(level, sizes[level]) for level in levels]
    if not setup.cfg.model.offload_activations:
        return sum(size for _, size in kept)
    leaving = [size for level, size in kept if level != "none"][-IN_FLIGHT:]
    return sum(size for level, size in kept if level == "none") + sum(leaving)


def between_stages(setup: TrainingSetup) -> float:
    """Return the bytes of what a pipeline rank receives and sends, when its backward begins.

    Activations and their gradients are tokens x hidden size in BF16. Inputs of micro-batches in flight are in
    `stored_activations`, and not counted again. From torch 2.13, torch/distributed/pipelining:

    - stage.py (`_setup_forward_recv_info`, `_create_grad_recv_info`): a stage has a buffer to receive each
      micro-batch's activations, unless it is the first, and one for their gradients, unless it is the last.
      They are kept between steps.
    - schedules.py: 1F1B keeps sent activations until their backward, one of the warm-up longer (`send_work`),
      and the last gradient (`bwd_sends`).
    - Interleaved schedules wait for their sends when the step ends (`send_ops`), but NCCL, unlike Gloo, drops
      what is sent in 0.1 s (its watchdog). Outputs of micro-batches in flight are left (`fwd_cache`), and one
      gradient.
    """
    layout, receives, sends = setup.layout, setup.stage > 0, setup.stage < setup.layout.pp - 1
    if layout.pp == 1:
        return 0.0
    received = (2 * (layout.virtual - 1) + receives + sends) * setup.accumulation
    if layout.virtual == 1:
        sent = sends * (setup.in_flight + 1) + receives * (1 - setup.in_flight)
    else:
        outputs = layout.virtual * setup.in_flight  # of this rank's stages
        # Inputs that `stored_activations` counts. The first stage receives none, and the last sends a loss.
        inputs = outputs if receives else (layout.virtual - 1) * layout.pp
        sent = outputs - (not sends) + 1 - inputs
    return (received + sent) * 2.0 * setup.tokens * setup.hidden
