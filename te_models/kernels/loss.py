"""Fused LM head and cross entropy that never stores the full logits.

T tokens, D hidden size, V vocabulary. The full logits would take T * V * (2 + 4) bytes: 6.3 GB for 8,192
tokens of Llama 3. Forward instead computes the logits of one chunk of rows, overwrites them with their
gradient, and accumulates the gradients of hidden states and LM head; backward only scales these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.data.collate import IGNORE
from fp8_suite.te_models.settings import CHUNK_BYTES
from torch import Tensor


class TokenLoss(NamedTuple):
    """Sums over label tokens: loss (float32) and correct top-1 predictions (int64)."""

    loss: Tensor
    correct: Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any = None) -> TokenLoss:
    """Sum the cross entropy of `hidden @ weight.T` against `labels` over labels other than -100.

    `hidden` [T, D] and `weight` [V, D] are floating point, `labels` [T] int64. Softmax is always computed in
    float32. Under torch.autocast the projection runs in the autocast dtype. With a `group`, the ranks hold
    parts of the vocabulary: `weight` is [V/N, D], `labels` are those of `parallel_cross_entropy`, and the
    gradient of `hidden` is this rank's term of a sum. Collective then.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return TokenLoss(*LinearCrossEntropy.apply(hidden, weight, labels, needs_grad, group))


class LinearCrossEntropy(torch.autograd.Function):
    """Fused projection and cross entropy: forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, needs_grad: bool, group: Any
    ) -> tuple:
        softmax = softmax_over(group)
        rows = max(128, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
        chunks = list(range(0, hidden.shape[0], rows))
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        correct = torch.zeros((), device=hidden.device, dtype=torch.int64)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = None
        for start in chunks:
            part, target = hidden[start : start + rows], labels[start : start + rows]
            logits = part @ weight.T  # [rows, V]
            chunk_loss, chunk_correct, _ = softmax(logits, target, write_grad=needs_grad)
            loss += chunk_loss
            correct += chunk_correct
            if needs_grad:
                torch.mm(logits, weight, out=grad_hidden[start : start + rows])
                if ctx.needs_input_grad[1]:
                    grad_weight = _accumulate(grad_weight, logits, part, only=len(chunks) == 1)
            del logits  # freed before the next chunk allocates its own
        # Not saved tensors, because backward frees these attributes one by one.
        ctx.grads, ctx.dtype = [grad_hidden, grad_weight], weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple:
        grad_weight = ctx.grads.pop()
        if grad_weight is not None:  # not frozen
            grad_weight = scaled(grad_weight, grad_loss, ctx.dtype)
        grad_hidden = scaled(ctx.grads.pop(), grad_loss, ctx.dtype)
        return grad_hidden, grad_weight, None, None, None


def _accumulate(total: Tensor | None, grad_logits: Tensor, hidden: Tensor, *, only: bool) -> Tensor:
    """Add grad_logits.T @ hidden [V, D] to `total`, in float32 unless this is the only chunk.

    In FP16 it is always float32: a sum over tokens may overflow, and the loss scale comes only in backward.
    """
    if only and hidden.dtype != torch.float16:
        return grad_logits.T @ hidden
    if grad_logits.dtype == torch.float32 or not grad_logits.is_cuda:
        if hidden.dtype == torch.float16:
            grad_logits, hidden = grad_logits.float(), hidden.float()
        with torch.autocast("cpu", enabled=False):
            part = (grad_logits.T @ hidden).float()
        return part if total is None else total.add_(part)
    if total is None:
        return torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
    return torch.addmm(total, grad_logits.T, hidden, out_dtype=torch.float32, out=total)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply `tensor` by the float32 scalar `factor` and convert to `dtype`."""
    if tensor.is_cuda:
        from fp8_suite.te_models.kernels.loss_triton import scaled

        return scaled(tensor, factor, dtype)
    return tensor.mul(factor).to(dtype)


def softmax_cross_entropy(
    logits: Tensor, labels: Tensor, *, write_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss (float32), correct predictions (int64) and log-sum-exp [rows] (float32).

    `logits` [rows, V] and `labels` [rows]; `write_grad` overwrites the logits with their gradient.
    """
    if logits.is_cuda:
        from fp8_suite.te_models.kernels.loss_triton import cross_entropy

        return cross_entropy(logits, labels, ignore=IGNORE, write_grad=write_grad)
    scores, valid = logits.float(), labels != IGNORE
    picked = scores.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    log_sum = scores.logsumexp(dim=-1)
    correct = (valid & (scores.argmax(dim=-1) == labels)).sum()  # ties: first index, as in the kernel
    if write_grad:
        logits.copy_(softmax_gradient(logits, labels, log_sum))
    return torch.where(valid, log_sum - picked, 0.0).sum(), correct, log_sum


def softmax_gradient(logits: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    """Return softmax(logits) [rows, V] minus 1 at the label, in float32; rows without a label are zero.

    A label of -1 is in another rank's part of the vocabulary.
    """
    grad, target = torch.exp(logits.float() - log_sum[:, None]), labels.clamp(min=0)[:, None]
    grad.scatter_add_(1, target, -(labels >= 0).to(grad.dtype)[:, None])
    return torch.where((labels != IGNORE)[:, None], grad, 0.0)


def softmax_over(group: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the cross entropy of a whole vocabulary, or of parts on the ranks of a group."""
    return softmax_cross_entropy if group is None else partial(parallel_cross_entropy, group=group)


def parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, write_grad: bool = False, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `softmax_cross_entropy` of logits [rows, V/N], this rank's part of the vocabulary. Collective.

    `labels` [rows] number the rows of this part; a label of another part is -1. Ranks exchange the largest
    logit, the sum of exponentials and the label's logit of each row, and the place of the largest.
    """
    held = labels >= 0
    if logits.is_cuda:
        local_labels = torch.where(held, labels, IGNORE)
        log_sum = softmax_cross_entropy(logits, local_labels)[2]
    else:
        log_sum = logits.float().logsumexp(dim=-1)
    top, best = logits.max(dim=-1)
    highest = torch.stack([log_sum, top.float()])
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0].float()
    sums = torch.stack([torch.exp(log_sum - highest[0]), torch.where(held, picked, 0.0)])
    dist.all_reduce(sums, group=group)
    log_sum, picked = highest[0] + sums[0].log(), sums[1]
    first = group.rank() * logits.shape[1]
    best = torch.where(top.float() == highest[1], best + first, torch.iinfo(torch.int64).max)
    label = torch.where(held, labels + first, torch.iinfo(torch.int64).max)
    places = torch.stack([best, label])
    dist.all_reduce(places, dist.ReduceOp.MIN, group=group)
    valid = labels != IGNORE
    if write_grad and logits.is_cuda:
        from fp8_suite.te_models.kernels.loss_triton import write_softmax_gradient_

        write_softmax_gradient_(logits, labels, log_sum, ignore=IGNORE)
    elif write_grad:
        logits.copy_(softmax_gradient(logits, labels, log_sum))
    correct = (valid & (places[0] == places[1])).sum()
    return torch.where(valid, log_sum - picked, 0.0).sum(), correct, log_sum


def logits_cross_entropy(logits: Tensor, labels: Tensor) -> TokenLoss:
    """Sum the cross entropy of full logits [T, V], for models whose head is more than one GEMM."""
    loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
    correct = ((logits.argmax(-1) == labels) & (labels != IGNORE)).sum()
    return TokenLoss(loss, correct)
