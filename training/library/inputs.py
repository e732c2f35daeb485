"""Batches of transformers as inputs of `TECausalLM.hidden_states`.

B rows, S tokens per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Further arguments that loops pass. There is no cache of keys and values.
WITHOUT_EFFECT = {"use_cache", "return_dict"}
# TRL passes these with `position_ids`, from which the boundaries of packed sequences are read.
BOUNDARIES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def decoder_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    multiple: int,
    **arguments: Any,
) -> dict[str, Any]:
    """Return the inputs of `TECausalLM.hidden_states`, rows padded to a multiple of `multiple` tokens.

    `attention_mask` [B, S] masks padding on either side; `position_ids` [B, S] restart with each packed
    sequence. ValueError for zeros between a row's tokens, TypeError for other arguments that are neither None
    nor False.
    """
    known = WITHOUT_EFFECT if position_ids is None else WITHOUT_EFFECT | BOUNDARIES
    for name, value in arguments.items():
        if name not in known and value is not None and value is not False:
            way = "; generate with use_cache=False" if name == "past_key_values" else ""
            raise TypeError(f"{name}: not supported by models of TE layers{way}")
    starts = torch.zeros_like(input_ids, dtype=torch.bool)  # first token of each sequence
    starts[:, 0] = True
    if attention_mask is not None:
        # Only padding before a sequence is separated from it: attention is causal.
        mask = attention_mask.int()
        starts[:, 1:] |= mask.diff() > 0
        if (starts.sum(1) > 2 - mask[:, 0]).any():
            raise ValueError("attention_mask: zeros between tokens of a row; pad before or after all of them")
    if position_ids is not None:
        starts[:, 1:] |= position_ids.diff() != 1
    padding = -input_ids.shape[1] % multiple
    input_ids = torch.cat([input_ids, input_ids[:, -1:].expand(-1, padding)], 1)
    rows, width = input_ids.shape
    starts = F.pad(starts, (0, padding))
    index = torch.arange(rows * width, device=input_ids.device).view(rows, width)
    one_per_row = attention_mask is None and position_ids is None
    firsts = index[:, 0] if one_per_row else index[starts]  # a mask as index waits for the GPU
    return {
        "input_ids": input_ids,
        "position_ids": index - torch.where(starts, index, 0).cummax(1).values,
        "cu_seqlens": F.pad(firsts, (0, 1), value=rows * width).int(),
        "max_seqlen": width,
    }
