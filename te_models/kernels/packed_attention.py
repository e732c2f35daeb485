"""Variable-length attention for packed batches in transformers models.

transformers separates packed samples by a block-diagonal mask [B, 1, S, S], which flash kernels do not
support. `packed_attention` reads the sequence boundaries (`cu_seqlens`) instead. It runs in

- FlashAttention 4 if the run uses it (self-tested by `training.kernels`, see `kernels.flash_attention`);
- otherwise torch's FlashAttention 2 on Ampere and later, for 16-bit inputs and head sizes that it supports;
- otherwise plain PyTorch in float32, which is also the reference in tests.

`install_packed_attention` installs it only if a trial forward pass shows plain causal attention. Models with
sliding windows, logit caps, sinks or biases keep transformers' attention.

B rows, S tokens per row, T = B*S, N sequences, n tokens of one sequence, H query heads, G key/value groups,
R = H / G, K head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.core.gpus import AMPERE
from fp8_suite.te_models.kernels import flash_attention
from torch import Tensor, nn

ATTENTION_NAME = "packed_causal"
FLASH_4_NAME = "packed_causal_4"  # transformers loads kernels of its own for names with "flash"
PROBE_NAME = "packed_causal_probe"
# Arguments of attention functions that `hf_attention` supports, or that do not affect causal attention.
SUPPORTED_ARGUMENTS = {"dropout", "is_causal", "scaling", "position_ids", "cache_position", "use_cache"}
SUPPORTED_ARGUMENTS |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def self_test(heads: int, groups: int, head_size: int) -> str | None:
    """Compare packed attention in FlashAttention 4 with the reference; return the problem, or None."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return packed_attention(q, k, v, cu_seqlens, max_seqlen, q.shape[-1] ** -0.5, True)[0]

    return flash_attention.self_test(attend, heads, groups, head_size)


def why_no_kernel(q: Tensor) -> str | None:
    """Return why flash kernels do not support queries such as `q` [..., K], or None."""
    if q.device.type != "cuda":
        return f"no kernel for {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < AMPERE:
        return "no kernel for GPUs older than Ampere"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"no kernel for {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"no kernel for head size {q.shape[-1]}"
    return None


@torch.library.custom_op("fp8_suite::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, flash_4: bool
) -> tuple[Tensor, Tensor]:
    """Attend causally within each sequence: q [T, H, K], k and v [T, G, K] -> out [T, H, K], log-sum-exp.

    `cu_seqlens` [N+1] int32: see `data.collate.Batch`. No sequence is longer than `max_seqlen`. The
    log-sum-exp is [H, T] float32 from flash kernels, and empty from the reference. It is a custom operator so
    that torch.compile does not trace into it.
    """
    if why_no_kernel(q) is None:
        if flash_4:
            forward = flash_attention.interface()._flash_attn_fwd
            arguments = _flash_4_arguments(cu_seqlens, max_seqlen, scale)
            out, lse, *_ = forward(q, k, v, return_lse=True, **arguments)
        else:
            lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
            forward = torch.ops.aten._flash_attention_forward
            dropout, causal, debug_mask = 0.0, True, False
            out, lse, *_ = forward(q, k, v, *lengths, dropout, causal, debug_mask, scale=scale)
        return out, lse
    out = torch.empty_like(q)
    for span in _spans(cu_seqlens):
        weights = _weights(q[span], k[span], scale)  # [G, R, n, n]
        mixed = torch.einsum("grst,tgk->sgrk", weights, v[span].float())
        out[span] = mixed.flatten(1, 2).to(q.dtype)  # [n, H, K]
    return out, q.new_empty(0, dtype=torch.float32)


@packed_attention.register_fake
def _(q, k, v, cu_seqlens, max_seqlen, scale, flash_4):
    size = (0,) if why_no_kernel(q) else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("fp8_suite::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    flash_4: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; for weights P, dS = P * (dO V^T - rowsum(dO * O)) (arXiv:2205.14135)."""
    if why_no_kernel(q) is None:
        if flash_4:
            arguments = _flash_4_arguments(cu_seqlens, max_seqlen, scale)
            arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
            grads = flash_attention.interface()._flash_attn_bwd(q, k, v, out, grad, lse, **arguments)
        else:
            lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
            # Dropout rate, causal, and the random state of dropout, which is unused.
            random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            rest = 0.0, True, random_state, torch.empty(0, device=q.device)
            backward = torch.ops.aten._flash_attention_backward
            grads = backward(grad, q, k, v, out, lse, *lengths, *rest, scale=scale)
        return grads[0], grads[1], grads[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for span in _spans(cu_seqlens):
        weights = _weights(q[span], k[span], scale)  # [G, R, n, n]
        # [n, G, R, K]
        d_out, o, queries = (t[span].float().unflatten(1, (k.shape[1], -1)) for t in (grad, out, q))
        d_weights = torch.einsum("sgrk,tgk->grst", d_out, v[span].float())
        d_scores = weights * (d_weights - (d_out * o).sum(-1).permute(1, 2, 0)[..., None]) * scale
        dv[span] = torch.einsum("grst,sgrk->tgk", weights, d_out).to(v.dtype)
        dk[span] = torch.einsum("grst,sgrk->tgk", d_scores, queries).to(k.dtype)
        dq[span] = torch.einsum("grst,tgk->sgrk", d_scores, k[span].float()).flatten(1, 2).to(q.dtype)
    return dq, dk, dv


@_packed_attention_backward.register_fake
def _(grad, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, flash_4):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    saved = *ctx.saved_tensors, *ctx.settings
    grads = torch.ops.fp8_suite.packed_attention_backward(grad.contiguous(), *saved)
    return *grads, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save)


def _flash_4_arguments(cu_seqlens: Tensor, max_seqlen: int, scale: float) -> dict[str, Any]:
    """Return keyword arguments of FlashAttention 4; their order differs between versions."""
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    lengths |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return lengths | {"softmax_scale": scale, "causal": True}


def _spans(cu_seqlens: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(cu_seqlens.tolist())]


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal softmax weights of one sequence: q [n, H, K], k [n, G, K] -> [G, R, n, n] float32."""
    queries = q.float().unflatten(1, (k.shape[1], -1))  # [n, G, R, K]
    scores = torch.einsum("sgrk,tgk->grst", queries, k.float()) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    flash_4: bool = False,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [B, H, S, K], key and value [B, G, S, K] -> [B, S, H, K].

    Without `cu_seq_lens_q` every row is one sequence.
    """
    unsupported = _unsupported(module, attention_mask, arguments)
    assert unsupported is None, f"{type(module).__name__} attends with {unsupported}"
    if torch.is_autocast_enabled(query.device.type):  # RoPE leaves queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows, heads, tokens, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    if cu_seq_lens_q is None and flash_4 and not why_no_kernel(query):
        max_length_q = max(tokens, flash_attention.LENGTH)  # a lower bound has kernels of its own to compile
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
    if cu_seq_lens_q is None:
        grouped = heads != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2), None
    q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value))  # [T, H or G, K]
    out, _ = packed_attention(q, k, v, cu_seq_lens_q, max_length_q, float(scale), flash_4)
    return out.unflatten(0, (rows, -1)), None


def _unsupported(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> str | None:
    """Name the argument that plain causal attention does not support, or None."""
    if mask is not None:
        return "a mask"
    if arguments.get("dropout"):
        return "dropout"
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "no causal mask"
    for name, value in arguments.items():
        if name not in SUPPORTED_ARGUMENTS and value is not None and value is not False:
            return name
    return None


@torch.no_grad()
def install_packed_attention(
    model: nn.Module,
    forward: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    flash_4: bool = False,
) -> str | None:
    """Install `hf_attention` in a transformers model; return why it must keep its own attention, or None.

    `forward` runs `model` on a small packed batch, during which every attention call and mask is inspected.
    `dtype` is the compute dtype of attention; `flash_4` runs it in FlashAttention 4, which must be installed.
    Collective if the model is sharded.
    """
    parameters = inspect.signature(model.get_decoder().forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return "its decoder does not forward sequence boundaries"
    if not model._can_set_attn_implementation():
        return "its attention function cannot be replaced"
    calls, reasons = _register(dtype)
    default_attention, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(PROBE_NAME)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.train()  # dropout is an argument in training mode only
            # Positions do not restart, so that transformers does not build a packing mask.
            ids = torch.arange(16, device=device)[None]  # [1, 16]
            forward(ids, ids, ids, torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 8)
    finally:
        model.train(training)
        model.set_attn_implementation(default_attention)
    if not calls:
        return "its attention does not use transformers' attention interface"
    if not reasons:
        model.set_attn_implementation(FLASH_4_NAME if flash_4 else ATTENTION_NAME)
    return next(iter(reasons), None)


def _register(dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Register `hf_attention` and a probe attention with transformers.

    Return two lists that the probe fills: attention calls, and reasons why `hf_attention` cannot replace
    them.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[str] = []
    reasons: list[str] = []

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        calls.append(type(module).__name__)
        if unsupported := _unsupported(module, attention_mask, kwargs):
            reasons.append(f"attention with {unsupported}")
        if kwargs.get("cu_seq_lens_q") is None:
            reasons.append("sequence boundaries do not reach its attention")
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            reasons.append("queries, keys and values of different head sizes")
        if query.is_cuda and (reason := why_no_kernel(query.new_empty(0, query.shape[-1], dtype=dtype))):
            reasons.append(reason)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def mask(*, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Any:
        if local_size is not None or use_vmap:
            reasons.append("attention with a sliding window or custom mask")
        return sdpa_mask(local_size=local_size, use_vmap=use_vmap, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, mask)
    # It has no mask function, so transformers builds no mask.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, hf_attention)
    ALL_ATTENTION_FUNCTIONS.register(FLASH_4_NAME, functools.partial(hf_attention, flash_4=True))
    return calls, reasons


def sequence_boundaries(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Return sequence boundaries as transformers' keyword arguments of attention."""
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return lengths | {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
