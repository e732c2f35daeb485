"""Check that a sample's loss depends on it alone: which models can be trained and packed, and why not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import bad_setting
from fp8_suite.te_models.hugging_face import HFCausalLM, high_precision_linears
from fp8_suite.te_models.kernels.loss import IGNORE
from torch import Tensor, nn

SAMPLE, PERMUTED_SAMPLE = (1, 2, 3, 4, 5, 6, 7, 8), (3, 1, 4, 2, 8, 5, 6, 7)


def refuse_dependent_samples(
    model: HFCausalLM, name: str, *, packed: bool, max_length: int, sharded: bool = False
) -> None:
    """Raise UserError if a sample's loss depends on other samples or on padding. Collective if `sharded`.

    Some models silently attend to later tokens, or ignore boundaries or positions of packed samples.
    `max_length` is the length of a row. The check runs in high precision, because per-tensor FP8 scales
    depend on all samples.
    """
    kind = type(model.model).__name__
    if packed and (reason := why_not_packed(model.model.config.get_text_config(), max_length)):
        raise bad_setting(f"{kind}: in rows of {max_length} tokens {reason}; add --no_packing", packing=True)
    with high_precision_linears(model):
        if _sees_other_half(model, 0, name, packed=False, sharded=sharded):
            raise bad_setting(f"{kind} attends to later tokens; use a causal language model", model_name=name)
        if not packed:
            return
        if _sees_other_half(model, 1, name, packed=True, sharded=sharded):
            raise bad_setting(f"{kind} lets packed samples see each other; add --no_packing", packing=True)
        if _ignores_positions(model):
            reason = f"{kind} ignores that positions start at 0 in each packed sample"
            raise bad_setting(f"{reason}; add --no_packing", packing=True)


def why_not_packed(config: Any, length: int) -> str | None:
    """Return why transformers treats samples in a row of `length` tokens otherwise than alone, or None."""

    def exceeded(owner: Any, name: str) -> bool:
        limit = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        return limit is not None and limit < length

    if exceeded(config, "attention_chunk_size"):
        return "it cuts rows, not samples, into chunks of attention (attention_chunk_size)"
    if getattr(config, "attn_temperature_tuning", False) and exceeded(config, "floor_scale"):
        return "it scales attention by the position in the row, not in the sample (attn_temperature_tuning)"
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        is_dynamic = rope.get("rope_type") == "dynamic" and exceeded(config, "max_position_embeddings")
        is_long = rope.get("rope_type") == "longrope" and exceeded(rope, "original_max_position_embeddings")
        if is_dynamic or is_long:
            return f"its {rope['rope_type']} RoPE depends on the longest sample of a batch"
    return None


@torch.no_grad()
def _ignores_positions(model: HFCausalLM) -> bool:
    """True if positions have no effect, as in a model that counts tokens from the start of the row."""
    losses = [_loss_of_half(model, 1, SAMPLE, packed=True, stride=stride) for stride in (1, 3)]
    return bool(losses[0] == losses[1])


def _loss_of_half(model: HFCausalLM, half: int, context: tuple, *, packed: bool, stride: int = 1) -> Tensor:
    """Return the loss of SAMPLE in one half (0 or 1) of a row [1, 16] with the tokens `context` in the other.

    The row is one sample, or two if packed.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[*SAMPLE, *context] if half == 0 else [*context, *SAMPLE]], device=device)
    labels = torch.full((1, 16), IGNORE, device=device)
    labels[0, 8 * half : 8 * half + 7] = torch.arange(1, 8, device=device)
    if not packed:
        return model(ids, labels, torch.arange(16, device=device)[None]).loss
    positions = stride * torch.arange(8, device=device).repeat(2)[None]  # [1, 16]
    # A longer bound than the samples runs the attention kernels of training, which are compiled already.
    return model(ids, labels, positions, torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 256).loss


def _sees_other_half(model: HFCausalLM, half: int, name: str, *, packed: bool, sharded: bool) -> bool:
    """True if the loss of one half of a row depends on the tokens of the other half.

    Permuting the other half must not change the loss. The permutation includes both ends, because a short
    convolution may reach no further. A mixture of experts may only round differently, so a changed loss is
    confirmed by its gradient with respect to the other half.
    """
    with torch.no_grad():
        loss, permuted = (_loss_of_half(model, half, x, packed=packed) for x in (SAMPLE, PERMUTED_SAMPLE))
    if not torch.isfinite(loss):
        raise bad_setting(
            f"its loss is {loss.item()}, so its weights or config.json are damaged; download it again",
            model_name=name,
        )
    changed = (loss != permuted).int()
    if sharded:  # the backward pass below is collective
        dist.all_reduce(changed, dist.ReduceOp.MAX)
    if not changed:
        return False
    embedded: list[Tensor] = []

    def detach(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    with model.model.get_input_embeddings().register_forward_hook(detach):
        (gradient,) = torch.autograd.grad(_loss_of_half(model, half, SAMPLE, packed=packed), embedded)
    return bool(gradient.chunk(2, dim=1)[1 - half].any())  # [1, 8, D]
