"""Fused LM head and cross entropy with the head's three GEMMs in FP8; see `loss` for the BF16 version.

Hidden states and weight are cast to E4M3, each with one scale from its amax (TE's current scaling). Gradients
of logits are cast to E5M2 with a constant scale, because they are probabilities. Softmax is computed in
float32 from BF16 logits, as in the BF16 version.

The gradient at the label, its probability minus 1, is not cast to FP8: E5M2 has a spacing of 12-25 %. The
rounding error would bias the sum of every row, which must be zero, and all logits would drift together. The
FP8 GEMMs therefore read a zero at the label. The label's gradient is computed as minus the sum of the row's
other gradients after their cast, and is multiplied by weight and hidden states in BF16.

FP8 GEMMs on Hopper read both operands along their inner dimension, so a matrix that two GEMMs read is stored
in both layouts. On a CPU, or a GPU without FP8 tensor cores, the same products are accumulated in float32.

If ranks hold parts of the vocabulary, the parts of the weight are cast with the amax of the whole, so that
their values are those of one rank, and the sums of a row's other gradients are added up over the ranks.

T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.te_models.kernels.loss import (
    IGNORE,
    LinearCrossEntropy,
    TokenLoss,
    softmax_gradient,
    softmax_over,
)
from fp8_suite.te_models.kernels.selection import reports_failure
from fp8_suite.te_models.settings import CHUNK_BYTES, TOKENS_PER_GEMM
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_SCALE = 2.0**15  # maps 1 below E5M2's maximum, 57,344; the smallest gradient is then 2**-31
MULTIPLE = 16  # FP8 GEMMs require multiples of 16 in every dimension
VOCABULARY_PER_SUM = 16384  # rows of the weight gradient that are accumulated at once


class Fp8(NamedTuple):
    """Matrix in FP8; its values are `rows * inverse`."""

    rows: Tensor  # [M, N]
    columns: Tensor | None  # transposed, [N, M], if backward needs it
    inverse: Tensor  # [] float32


def linear_cross_entropy_fp8(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any = None) -> TokenLoss:
    """Compute `loss.linear_cross_entropy` with its GEMMs in FP8; sizes of `weight` must be multiples of 16.

    `hidden` [T, D] and `weight` [V, D] are rounded to BF16 first; `labels` [T] int64.
    """
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return TokenLoss(*_Fp8LinearCrossEntropy.apply(hidden, weight, labels, needs_grad, group))


class _Fp8LinearCrossEntropy(LinearCrossEntropy):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, needs_grad: bool, group: Any
    ) -> tuple:
        tokens, vocab, softmax = hidden.shape[0], weight.shape[0], softmax_over(group)
        padding = -tokens % MULTIPLE
        if padding:
            hidden, labels = F.pad(hidden, (0, 0, 0, padding)), F.pad(labels, (0, padding), value=IGNORE)
        needs_weight = needs_grad and ctx.needs_input_grad[1]  # not frozen
        x, w = cast(hidden, columns=needs_weight), cast(weight, columns=needs_grad, group=group)
        rows = max(128, CHUNK_BYTES // (2 * vocab) // 128 * 128)
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        correct = torch.zeros((), device=hidden.device, dtype=torch.int64)
        grad_hidden = hidden.new_empty(x.rows.shape, dtype=torch.bfloat16) if needs_grad else None
        at_label = hidden.new_empty(len(labels), dtype=torch.float32) if needs_grad else None
        grad_weight, inverse = None, torch.full_like(x.inverse, 1 / GRADIENT_SCALE)
        for first in range(0, len(labels), TOKENS_PER_GEMM):
            last = min(len(labels), first + TOKENS_PER_GEMM)
            columns = hidden.new_empty(vocab, last - first, dtype=E5M2) if needs_grad else None
            for start in range(first, last, rows):
                end = min(last, start + rows)
                target = labels[start:end]
                logits = multiply(x.rows[start:end], w.rows, x.inverse, w.inverse, fast=True)  # [rows, V]
                chunk_loss, chunk_correct, log_sum = softmax(logits, target)
                loss += chunk_loss
                correct += chunk_correct
                if needs_grad:
                    grads, at_label[start:end] = cast_gradient(
                        logits, target, log_sum, columns, start - first
                    )
                del logits  # freed before the next chunk allocates its own
                if needs_grad:
                    grad_hidden[start:end] = multiply(grads, w.columns, inverse, w.inverse)
                    del grads
            if needs_weight:
                operands = columns, x.columns[:, first:last], inverse, x.inverse
                grad_weight = _accumulate(grad_weight, *operands, only=last - first == len(labels))
                del operands
            del columns
        if needs_grad and group is not None:
            dist.all_reduce(at_label, group=group)
            at_label.masked_fill_(labels < 0, 0.0)  # labels of other parts
        if needs_grad:
            add_labels_to_hidden_grad_(grad_hidden, weight, labels, at_label)
        if needs_weight:
            add_labels_to_weight_grad_(grad_weight, hidden, labels, at_label)
        ctx.grads, ctx.dtype = [grad_hidden[:tokens] if needs_grad else None, grad_weight], torch.bfloat16
        ctx.mark_non_differentiable(correct)
        return loss, correct


def _accumulate(total: Tensor | None, grads: Tensor, hidden: Tensor, *scales: Tensor, only: bool) -> Tensor:
    """Add grads [V, K] @ hidden [D, K].T to `total`, in float32 unless this is the only part."""
    if total is None:
        return multiply(grads, hidden, *scales, dtype=torch.bfloat16 if only else torch.float32)
    for start in range(0, len(total), VOCABULARY_PER_SUM):
        part = slice(start, start + VOCABULARY_PER_SUM)
        total[part] += multiply(grads[part], hidden, *scales, dtype=torch.float32)
    return total


def has_fp8_units(tensor: Tensor) -> bool:
    """True if `tensor` is on a GPU with FP8 tensor cores."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)


def _kernels(tensor: Tensor) -> Any:
    """Return the module of CUDA kernels for `tensor`, or None where plain PyTorch runs."""
    return (
        importlib.import_module("fp8_suite.te_models.kernels.loss_triton") if has_fp8_units(tensor) else None
    )


def multiply(
    a: Tensor, b: Tensor, *inverses: Tensor, dtype: torch.dtype = torch.bfloat16, fast: bool = False
) -> Tensor:
    """Return the FP8 product a [M, K] @ b [N, K].T in `dtype`, with both scales undone.

    `inverses` are the inverse scales of `a` and `b`; `fast` enables fast accumulation in the tensor cores.
    """
    a_inverse, b_inverse = inverses
    if has_fp8_units(a):
        scales = {"scale_a": a_inverse, "scale_b": b_inverse}
        return torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t() * (a_inverse * b_inverse)).to(dtype)


def cast(matrix: Tensor, *, columns: bool = True, group: Any = None) -> Fp8:
    """Cast a BF16 matrix [M, N] to E4M3, also transposed if `columns`; an amax of 0 has scale 1.

    The amax is the largest of all ranks of a `group`. Collective then.
    """
    amax = torch.linalg.vector_norm(matrix, float("inf")).float()
    if group is not None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    scale = (torch.finfo(E4M3).max / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(amax > 0, scale, 1.0)
    if kernels := _kernels(matrix):
        return Fp8(*kernels.cast_both(matrix, scale, columns=columns), 1 / scale)
    rows = (matrix.float() * scale).to(E4M3)
    return Fp8(rows, _transposed(rows) if columns else None, 1 / scale)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.view(torch.uint8).t().contiguous().view(matrix.dtype)


def cast_gradient(
    logits: Tensor, labels: Tensor, log_sum: Tensor, columns: Tensor, at: int
) -> tuple[Tensor, Tensor]:
    """Cast the gradient of logits [rows, V] to scaled E5M2 with zeros at labels.

    Return it and the gradient at the labels, [rows] float32: minus the row's sum. Also write the cast
    gradient, transposed, to `columns` [V, .], beginning at column `at`. A label of -1 is in another rank's
    part of the vocabulary, and the gradient at it is this rank's term of a sum.
    """
    if kernels := _kernels(logits):
        settings = {"ignore": IGNORE, "scale": GRADIENT_SCALE}
        return kernels.gradient_both(logits, labels, log_sum, columns, at, **settings)
    at_label = torch.arange(logits.shape[1], device=labels.device) == labels[:, None]
    gradient = softmax_gradient(logits, labels, log_sum).masked_fill_(at_label, 0.0)
    rows = (gradient * GRADIENT_SCALE).to(E5M2)
    columns[:, at : at + len(rows)] = _transposed(rows)
    return rows, rows.float().sum(1) / -GRADIENT_SCALE


def add_labels_to_hidden_grad_(grad_hidden: Tensor, weight: Tensor, labels: Tensor, at_label: Tensor) -> None:
    """Add at_label[t] * weight[labels[t]] to each row t of `grad_hidden` [T, D]; weight [V, D].

    `at_label` is zero where `labels` are negative.
    """
    if kernels := _kernels(weight):
        return kernels.add_labels_to_hidden_grad_(grad_hidden, weight, labels, at_label)
    rows = weight.index_select(0, labels.clamp(min=0)).float()
    grad_hidden.copy_(grad_hidden.float() + at_label[:, None] * rows)


def add_labels_to_weight_grad_(grad_weight: Tensor, hidden: Tensor, labels: Tensor, at_label: Tensor) -> None:
    """Add at_label[t] * hidden[t] to row labels[t] of `grad_weight` [V, D], for every token t.

    The tokens of a label are first summed in float32, in a fixed order, so results are deterministic.
    """
    if kernels := _kernels(hidden):
        return kernels.add_labels_to_weight_grad_(grad_weight, hidden, labels, at_label)
    valid = labels >= 0
    rows, places = labels[valid].unique(return_inverse=True)
    parts = at_label[valid, None] * hidden[valid].float()
    sums = parts.new_zeros(len(rows), parts.shape[1]).index_add_(0, places, parts)
    grad_weight[rows] = (grad_weight[rows].float() + sums).to(grad_weight.dtype)


@reports_failure
def self_test(device: str = "cuda") -> str | None:
    """Compare loss and gradients on `device` with the CPU's; return the first difference, or None."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocab, size = 208, 2064, 272  # these sizes do not fill the last blocks
    hidden, weight = (torch.randn(rows, size, generator=generator) for rows in (tokens, vocab))
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[2::4] = torch.arange(tokens // 4) % 3  # more tokens per label than the kernel's block
    labels[::3], labels[1] = IGNORE, vocab - 1
    inputs = hidden.bfloat16(), (weight / 8).bfloat16(), labels
    results, references = (_loss_and_gradients(*(t.to(place) for t in inputs)) for place in (device, "cpu"))
    for name, reference in references.items():
        error = (results[name].cpu().float() - reference.float()).norm() / reference.float().norm()
        if not error < 2e-2:  # true for NaN
            return f"the {name} differs from the reference"
    return None


def _loss_and_gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        loss = linear_cross_entropy_fp8(*leaves, labels).loss
        grad_hidden, grad_weight = torch.autograd.grad(loss, leaves)
    return {
        "loss": loss.detach(),
        "gradient of hidden states": grad_hidden,
        "gradient of the weight": grad_weight,
    }
