"""Attention of packed batches for models of transformers: samples apart without a mask, by a flash kernel.

transformers keeps packed samples apart with a block-diagonal mask [B, 1, S, S], which no flash kernel takes.
Here attention reads where sequences start (`cu_seqlens`) instead. A model gets it only if a trial run shows
that its attention is plainly causal; windows, caps, sinks and biases keep transformers' own.

B rows, S tokens a row, T = B*S, N sequences, H query heads, G key/value groups, R = H / G, K head size.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "packed_causal"
PROBE = "packed_causal_probe"
FLASH_ATTENTION_4 = "flash_attn.cute.interface"
# What models hand to their attention and what does not change it.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k"})
HARMLESS |= {"max_length_q", "max_length_k"}
COMPUTED = ("dropout", "is_causal", "scaling")


@torch.library.custom_op("fp8_suite::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within each sequence: [T, H, K], [T, G, K] twice -> [T, H, K], and the kernel's sums.

    `cu_seqlens` int32 [N+1] as in `data.Batch`; no sequence is longer than `max_seqlen`. One operator, so
    that compiled layers keep it whole. Where no kernel runs, see `why_no_kernel`, the definition is computed.
    """
    if not why_no_kernel(q) and _flash_attention_4:
        arguments = _for_flash_attention_4(cu_seqlens, max_seqlen, scale)
        out, sums, *_ = _flash_attention_4._flash_attn_fwd(q, k, v, return_lse=True, **arguments)
        return out, sums
    if not why_no_kernel(q):
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
        )
        return out, sums
    out = torch.empty_like(q)
    for span in _spans(cu_seqlens):
        weights = _weights(q[span], k[span], scale)  # [G, R, n, n]
        mixed = torch.einsum("grst,tgk->sgrk", weights, v[span].float())
        out[span] = mixed.flatten(1, 2).to(q.dtype)
    return out, q.new_empty(0, dtype=torch.float32)


@packed_attention.register_fake
def _(q, k, v, cu_seqlens, max_seqlen, scale):
    size = (0,) if why_no_kernel(q) else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("fp8_suite::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; with P the weights, dS = P * (dO V^T - rowsum(dO * O)), arXiv:2205.14135."""
    if not why_no_kernel(q) and _flash_attention_4:
        arguments = _for_flash_attention_4(cu_seqlens, max_seqlen, scale)
        arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
        grads = _flash_attention_4._flash_attn_bwd(q, k, v, out, grad, sums, **arguments)
        return grads[0], grads[1], grads[2]
    if not why_no_kernel(q):
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none
        unused = torch.empty(0, device=q.device)
        spans = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums, *spans, 0.0, True, random_state, unused, scale=scale
        )
        return grads[0], grads[1], grads[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    groups = k.shape[1]
    for span in _spans(cu_seqlens):
        weights = _weights(q[span], k[span], scale)  # [G, R, n, n]
        split = [t[span].float().unflatten(1, (groups, -1)) for t in (grad, out, q)]  # [n, G, R, K] each
        d_out, o, queries = split
        d_weights = torch.einsum("sgrk,tgk->grst", d_out, v[span].float())
        d_scores = weights * (d_weights - (d_out * o).sum(-1).permute(1, 2, 0)[..., None]) * scale
        dv[span] = torch.einsum("grst,sgrk->tgk", weights, d_out).to(v.dtype)
        dk[span] = torch.einsum("grst,sgrk->tgk", d_scores, queries).to(k.dtype)
        dq[span] = torch.einsum("grst,tgk->sgrk", d_scores, k[span].float()).flatten(1, 2).to(q.dtype)
    return dq, dk, dv


@_packed_attention_backward.register_fake
def _(grad, q, k, v, out, sums, cu_seqlens, max_seqlen, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, cu_seqlens, ctx.max_seqlen, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    grads = torch.ops.fp8_suite.packed_attention_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.max_seqlen, ctx.scale
    )
    return (*grads, None, None, None)


packed_attention.register_autograd(_backward, setup_context=_save)


# The module whose kernels run instead of torch's, see `use_flash_attention_4`.
_flash_attention_4: Any = None


def use_flash_attention_4() -> None:
    """From now on FlashAttention 4's kernels, which must be installed, run instead of torch's."""
    global _flash_attention_4
    _flash_attention_4 = importlib.import_module(FLASH_ATTENTION_4)


def use_torch() -> None:
    """Undo `use_flash_attention_4`."""
    global _flash_attention_4
    _flash_attention_4 = None


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """`packed_attention` with the usual scale, without its sums."""
    return packed_attention(q, k, v, cu_seqlens, max_seqlen, q.shape[-1] ** -0.5)[0]


def _for_flash_attention_4(cu_seqlens: Tensor, max_seqlen: int, scale: float) -> dict[str, Any]:
    """The arguments that forward and backward share; by name, since their order changes with the version."""
    spans = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    spans |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return spans | {"softmax_scale": scale, "causal": True}


def why_no_kernel(q: Tensor) -> str | None:
    """Why torch's flash kernel cannot take queries [..., K] like these, or None."""
    if q.device.type != "cuda":
        return f"no kernel for {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"no kernel for {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"no kernel for head size {q.shape[-1]}"
    return None


def _spans(cu_seqlens: Tensor) -> list[slice]:
    borders = cu_seqlens.tolist()
    return [slice(a, b) for a, b in pairwise(borders)]


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal softmax weights of one sequence, [n, H, K] and [n, G, K] -> [G, R, n, n] float32."""
    queries = q.float().unflatten(1, (k.shape[1], -1))  # [n, G, R, K]
    scores = torch.einsum("sgrk,tgk->grst", queries, k.float()) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls as a model's attention: [B, H, S, K], [B, G, S, K] twice -> [B, S, H, K].

    Without `cu_seq_lens_q` every row is one sequence. RuntimeError for anything it does not compute.
    """
    lost = _not_computed(module, attention_mask, dropout, is_causal, others)
    if query.shape[2] != key.shape[2]:
        lost = "keys of earlier calls"
    if lost:
        raise RuntimeError(f"{type(module).__name__}: attention with {lost} reached {NAME}; report it")
    if torch.is_autocast_enabled(query.device.type):  # RoPE leaves queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows, heads, _, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    kernel = _flash_attention_4 and not why_no_kernel(query)
    if cu_seq_lens_q is None and kernel:
        max_length_q = query.shape[2]
        borders = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        cu_seq_lens_q = borders * max_length_q
    if cu_seq_lens_q is None:
        grouped = heads != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2), None
    q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value))  # [T, H or G, K]
    out, _ = packed_attention(q, k, v, cu_seq_lens_q, max_length_q, float(scale))
    return out.unflatten(0, (rows, -1)), None


def _not_computed(
    module: nn.Module, mask: Tensor | None, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> str | None:
    """What a call asks for beyond causal attention, or None."""
    if mask is not None:
        return "a mask"
    if dropout:
        return "dropout"
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return "no causal order"
    for name, value in others.items():
        if name not in HARMLESS and value is not None and value is not False:
            return name
    return None


class _Trial:
    """Stands in for a model's attention and masks, and notes what `attend` would not compute."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.calls, self.reasons = dtype, 0, []

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.calls += 1
        others = {name: value for name, value in kwargs.items() if name not in COMPUTED}
        lost = _not_computed(module, mask, kwargs.get("dropout", 0.0), kwargs.get("is_causal"), others)
        if lost:
            self.reasons.append(f"attention with {lost}")
        if kwargs.get("cu_seq_lens_q") is None:
            self.reasons.append("sequence borders do not reach its attention")
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            self.reasons.append("heads of several sizes")
        computed = query.new_empty(0, query.shape[-1], dtype=self.dtype)
        if query.is_cuda and (missing := why_no_kernel(computed)):
            self.reasons.append(missing)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    def mask(self, *, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        if local_size is not None or use_vmap:
            self.reasons.append("attention with a window, or a mask of its own")
        return sdpa_mask(local_size=local_size, use_vmap=use_vmap, **kwargs)


@torch.no_grad()
def use_packed_attention(
    model: nn.Module, forward: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Let a causal LM of transformers attend by `attend`; a reason if it keeps its own attention.

    `forward` runs `model` on a batch with sequence borders. A few tokens go through it, and every attention
    call and mask is looked at. Collective if sharded. `dtype` is the one that attention computes in.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parameters = inspect.signature(model.get_decoder().forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return "its decoder hands no sequence borders on"
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():
        return "its attention is no function that can be replaced"
    trial, own, training = _Trial(dtype), model.config._attn_implementation, model.training
    ALL_ATTENTION_FUNCTIONS.register(PROBE, trial.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, trial.mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)  # without a mask function: none is built
    model.set_attn_implementation(PROBE)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.train()  # so that dropout shows
            # Positions are of one sequence, so that transformers has no reason for a mask of its own.
            ids = torch.arange(16, device=device)[None]
            forward(ids, ids, ids, torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 8)
    finally:
        model.train(training)
        model.set_attn_implementation(own)
    if not trial.calls:
        return "its attention does not go through transformers' attention interface"
    if trial.reasons:
        return trial.reasons[0]
    model.set_attn_implementation(NAME)
    return None


def sequence_borders(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The names under which transformers hands borders on to attention."""
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }
