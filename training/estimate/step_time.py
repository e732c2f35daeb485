"""Predict the time of a training step from FLOPs, bytes, and rates measured on an H200.

`auto` and the planner choose by it. Rates are fractions of a GPU's peaks; kernels are assumed to be as
efficient on other GPUs. Unless a comment names another source, a rate is from the kernel profile of Llama 3.1
8B with delayed scaling (8,192 tokens, 575 ms per step).
"""

from __future__ import annotations

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.recipes import BF16_COSTS, RECIPES, costs_of
from fp8_suite.te_models.shape import attention_flops
from fp8_suite.training.estimate.activations import recomputed_attention, recomputed_weights
from fp8_suite.training.estimate.setup import TrainingSetup, rank_setups
from fp8_suite.training.estimate.transfers import (
    EXPOSED,
    NETWORK_BANDWIDTH,
    communication_seconds,
    context_seconds,
    exchange,
    pipeline_seconds,
    tensor_seconds,
)

HEAD_SHARE = 0.725  # LM head, BF16: 25.8 TFLOP in 36 ms
FP8_HEAD_SHARE = 0.63  # LM head, FP8, including casts: 25.8 TFLOP in 21 ms
# (E, d0): attention over L tokens with head size d reaches a fraction E * d / (d + d0) * L / (L + L0) of the
# BF16 peak, because softmax costs the same for every d, and tiles on the diagonal of the causal mask as much
# as others. Fitted to 52.8 TFLOP at d = 128 and L = 8,192 in 142 ms (cuDNN) and 123 ms (FlashAttention 4), to
# the 1B at d = 64: 157 ms per step with cuDNN, 11 ms less with FlashAttention 4; L0 to studies h200-long and
# h200-offload.
ATTENTION = {"cudnn": (0.746, 78.0), "flash": (0.714, 42.0)}
HALF_LENGTH = 2000
ATTENTION_FORWARD = 0.25  # fraction of attention time in forward: 35 of 142 ms
# Elementwise kernels reach 2 to 4.3 of 4.8 TB/s (norms 3.1, SwiGLU 3.5, casts 3.9, adds 4.3).
BANDWIDTH_SHARE = 0.70
ADAM_SHARE = 0.86  # the suite's AdamW: 26 bytes per parameter, 8.03e9 parameters, 50.5 ms
TORCH_ADAM_SHARE = 0.415  # torch's AdamW in ZeRO is as slow as TE's FusedAdam: 105 ms
# TE's kernels to split QKV and rotate take 118 ms a step, the suite's 28 (profiles of study h200-profile).
UNFUSED_ROPE = 118 / 28
IDLE = 0.03  # fraction of a step without any kernel in the profile
# CPU time to launch forward and backward of a layer: 5 ms limit the recorded run gsm-4gpu-fsdp_full-bf16
# (85 ms, 16 layers, 3,072 tokens). TE layers of a 7B took 4.5 to 4.7 ms on two H100 hosts, recomputed ones
# 7.5 to 8.2 ms.
LAUNCH_SECONDS, RECOMPUTED_LAUNCH_SECONDS = 5e-3, 8e-3
ZERO3_LAUNCH_SECONDS = 15e-3  # CPU time per layer in ZeRO 3's module hooks; measured 12 to 17 ms
# --offload_optimizer: PCIe 5.0 x16 from or to pinned memory, both directions at once (assumed), and what the
# GPUs of a host share: four H200 moved about 23 GB/s each (study h200-four).
PCIE_BANDWIDTH, PCIE_BANDWIDTH_OF_HOST = 50e9, 100e9
OPTIMIZER_HOST_BANDWIDTH = 40e9  # CPU offload: PCIe and host memory bandwidth per GPU, with 16 cores per GPU


def _gemm_seconds(setup: TrainingSetup, gpu: Gpu) -> float:
    """Time of the linear layers' GEMMs: forward, recomputation, dgrad, and wgrad unless they are frozen."""
    flops = 2.0 * setup.model.gemm_weights * setup.tokens
    trains, recomputed = not setup.model.adapters, recomputed_weights(setup) / setup.model.gemm_weights
    passes = 2 + trains + recomputed
    bf16 = flops / (gpu.bf16_tflops * 1e12 * BF16_COSTS.gemm_share)
    if setup.recipe == "bf16":
        return passes * bf16
    if gpu.fp8_tflops is None:
        raise bad_setting("the GPU's FP8 peak is unknown; add --fp8_tflops", mixed_precision="fp8")
    fp8 = flops / (gpu.fp8_tflops * 1e12 * costs_of(setup.recipe).gemm_share)
    low = (passes - 1) * fp8 + bf16 if RECIPES[setup.recipe].bf16_wgrad and trains else passes * fp8
    return low * setup.fp8_layer_share + passes * bf16 * (1 - setup.fp8_layer_share)


def _attention_seconds(setup: TrainingSetup, gpu: Gpu) -> float:
    s, length = setup.model.shape, setup.cfg.data.max_seq_length
    flops = attention_flops(s, setup.tokens * length)
    at_best, half = ATTENTION["flash" if setup.cfg.model.flash_attention else "cudnn"]
    share = at_best * s.head_dim / (s.head_dim + half) * length / (length + HALF_LENGTH)
    again = 1 + ATTENTION_FORWARD * recomputed_attention(setup)
    return again * flops / (gpu.bf16_tflops * 1e12 * share)


def _head_seconds(setup: TrainingSetup, gpu: Gpu) -> float:
    if not setup.has_head:
        return 0.0
    fp8 = setup.cfg.precision.fp8_lm_head
    tflops = gpu.fp8_tflops * FP8_HEAD_SHARE if fp8 else gpu.bf16_tflops * HEAD_SHARE
    flops = 4.0 * setup.model.head_weights + 2.0 * setup.model.gradients(setup.model.head_weights)
    return flops * setup.tokens / (1e12 * tflops)


def _elementwise_bytes(setup: TrainingSetup) -> float:
    """Memory traffic of norms, RoPE, residuals and SwiGLU, in BF16, forward and backward."""
    s = setup.model.shape
    hidden, ffn = setup.hidden, s.ffn_hidden_size
    # Bytes per token and layer, 2 for each value read or written: two norms, RoPE, two residual adds, SwiGLU.
    rope = 2 * 2 * (s.num_heads + s.num_kv_heads) * s.head_dim
    if setup.cfg.model.use_te and (setup.layout.tp > 1 or setup.model.qk_norm):
        rope *= UNFUSED_ROPE
    forward = 2 * (2 * 2 * hidden) + rope + 2 * 6 * hidden + 2 * 3 * ffn
    backward = 2 * (2 * 3 * hidden) + rope + 2 * 6 * hidden + 2 * 5 * ffn
    return s.num_layers * setup.tokens * (forward * (2 - setup.share_of("none")) + backward)


def _cast_bytes(setup: TrainingSetup) -> float:
    """Memory traffic of casting inputs, output gradients and weights to FP8."""
    s = setup.model.shape
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    inputs = 2 * setup.hidden + queries + s.ffn_hidden_size
    gradients = 2 * setup.hidden + queries + 2 * keys + 2 * s.ffn_hidden_size
    values = s.num_layers * setup.tokens * (inputs * (2 - setup.share_of("none")) + gradients)
    transposed = 0.0  # of gathered inputs and output gradients of hidden size; their casts write one layout
    if setup.gathers_rows:
        transposed = s.num_layers * setup.tokens * 4 * (2 * s.hidden_size - setup.hidden)
    # Casts of a weight per micro-batch: one, to both layouts, if it is kept for backward. Under FSDP2 and in
    # torchao's layers forward makes one layout and backward both; a recomputed TE layer makes both twice.
    stored, casts = setup.share_of("none"), 1.0 if setup.keeps_fp8_weights else 1.5
    if setup.caches_fp8_weights:
        casts /= setup.accumulation
    again = 2.0 if setup.cfg.model.use_te and not setup.fsdp else 1.5
    per_weight = costs_of(setup.recipe).cast_bytes * (casts * stored + again * (1 - stored))
    if setup.optimizer.holds_fp8_weights:
        per_weight = 2.0  # backward transposes them: a byte is read and one written
    # Without wgrad, inputs and gradients are cast to one layout.
    per_value = costs_of(setup.recipe).cast_bytes - bool(setup.model.adapters)
    moved = per_value * values + transposed + per_weight * setup.model.gemm_weights
    return moved * setup.fp8_layer_share


def _adapter_bytes(setup: TrainingSetup) -> float:
    """Memory traffic of adapters, which take few FLOPs: inputs [T, in] and outputs [T, out] in BF16.

    Forward reads an input once and adds to an output. Backward reads the gradient of an output twice, the
    input once, and adds to the gradient of the input: it writes its part, reads both, and writes the sum.
    """
    passes, moved = 2 - setup.share_of("none"), 0.0
    for share, inputs, outputs in setup.adapted_gemms:
        moved += share * (passes * (2 * inputs + 4 * outputs) + 10 * inputs + 4 * outputs)
    return setup.model.shape.num_layers * setup.tokens * moved


def adam_bytes(setup: TrainingSetup) -> float:
    """Optimizer traffic in bytes per parameter: weight, gradient, 16-bit remainder, moments, FP8 weight."""
    optimizer = setup.optimizer
    quantization = (2 + 2 + 1) * setup.fp8_share  # finding the largest value is a pass of its own
    return 2 * 2 + 2 + 2 * 2 * optimizer.master_weights + 2 * optimizer.moment_bytes + quantization


def _optimizer_seconds(setup: TrainingSetup, gpu: Gpu) -> float:
    parameters = setup.model.trained / setup.shards
    if setup.mode_spec.offload:
        return 28 * parameters / OPTIMIZER_HOST_BANDWIDTH
    fused = setup.optimizer.kind == "fused_adamw"
    bandwidth = gpu.memory_bandwidth * (ADAM_SHARE if fused else TORCH_ADAM_SHARE)
    gradient_norm = 2 * parameters / (gpu.memory_bandwidth * BANDWIDTH_SHARE)
    pcie = min(PCIE_BANDWIDTH, PCIE_BANDWIDTH_OF_HOST / min(setup.gpus, setup.gpus_per_node))
    per_parameter = max(adam_bytes(setup) / bandwidth, setup.offloaded_state / pcie)
    return per_parameter * parameters + gradient_norm


def _launch_seconds(setup: TrainingSetup) -> float:
    """Return the mean CPU time of a layer and micro-batch."""
    once = ZERO3_LAUNCH_SECONDS if setup.mode_spec.stage == 3 else LAUNCH_SECONDS
    te_layers = setup.cfg.model.use_te and setup.mode_spec.stage != 3
    again = RECOMPUTED_LAUNCH_SECONDS if te_layers else 4 / 3 * once  # forward is a third
    return once * setup.share_of("none") + again * (1 - setup.share_of("none"))


def step_seconds(setup: TrainingSetup, gpu: Gpu, *, network: float = NETWORK_BANDWIDTH) -> dict[str, float]:
    """Return the seconds of one optimizer step by part, for full sequences and without data loading.

    In a pipeline all ranks take the time of the slowest: the last, which has the LM head, or one before it.
    """
    steps = (_rank_seconds(rank, gpu, network) for rank in rank_setups(setup)[-2:])
    return max(steps, key=lambda parts: sum(parts.values()))


def _rank_seconds(setup: TrainingSetup, gpu: Gpu, network: float) -> dict[str, float]:
    model, bandwidth = setup.model, gpu.memory_bandwidth * BANDWIDTH_SHARE
    attention = _attention_seconds(setup, gpu)
    micro_batch = {
        "linear layers": _gemm_seconds(setup, gpu),
        "attention": attention,
        "LM head": _head_seconds(setup, gpu),
        "norms, SwiGLU, adds": _elementwise_bytes(setup) / bandwidth,
        "FP8 casts": _cast_bytes(setup) / bandwidth,
        "adapters": _adapter_bytes(setup) / bandwidth,
        "tensor parallelism": tensor_seconds(setup, gpu),
        "context parallelism": context_seconds(setup, gpu, network, attention),
        "pipeline transfers": pipeline_seconds(setup, gpu, network),
    }
    parts = {name: setup.accumulation * value for name, value in micro_batch.items()}
    compute = sum(parts.values())
    parts["optimizer"] = _optimizer_seconds(setup, gpu)
    wire = communication_seconds(setup, gpu, network)
    if setup.mode_spec.offload:
        wire += 2 * model.parameters * (2 * setup.accumulation + 1) / setup.gpus / OPTIMIZER_HOST_BANDWIDTH
    parts["copies around transfers"] = exchange(setup).copied / bandwidth
    exposed = wire if setup.exchanges_sums else max(EXPOSED * wire, wire - compute)
    parts["exposed communication"] = exposed
    parts["idle"] = IDLE * sum(parts.values())
    launches = setup.accumulation * model.shape.num_layers * _launch_seconds(setup)
    parts["waiting for the CPU"] = max(0.0, launches - sum(parts.values()))
    parts["pipeline bubble"] = setup.layout.bubble(setup.accumulation) * max(compute, launches)
    return parts
